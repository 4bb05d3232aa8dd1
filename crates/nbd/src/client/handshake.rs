//! The client's side of the handshake: structured replies, metadata contexts and `GO`, and
//! `EXPORT_NAME` for servers without `GO`.

use super::ClientError;
use crate::export::BlockSizes;
use crate::wire::{self, Reader};

/// Longest reply to an option in bytes.
const REPLY_BYTES_MAX: usize = 64 << 10;
/// Most replies to one option.
const REPLIES_MAX: u32 = 4096;
/// Most metadata contexts that a server may select.
const CONTEXTS_MAX: usize = 64;

const GREETING_BYTES: usize = 18;
const REPLY_HEADER_BYTES: usize = 20;
const EXPORT_BYTES: usize = 10;

/// What a client asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// The export's name.
    pub export: String,
    /// Whether to ask for structured replies.
    pub structured: bool,
    /// Names of the metadata contexts to select; contexts need structured replies.
    pub contexts: Vec<String>,
}

impl Wanted {
    /// An export with structured replies and no metadata contexts.
    pub fn new(export: impl Into<String>) -> Wanted {
        Wanted { export: export.into(), structured: true, contexts: Vec::new() }
    }
}

/// What a server granted.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Negotiated {
    /// Size of the export in bytes.
    pub size_bytes: u64,
    /// Transmission flags.
    pub flags: u16,
    /// Whether reads are answered with structured replies.
    pub structured: bool,
    /// The selected metadata contexts: id and name.
    pub contexts: Vec<(u32, String)>,
    /// Size constraints; the protocol's defaults when the server sends none.
    pub block_sizes: BlockSizes,
    /// Canonical name, if the server sent one.
    pub name: Option<String>,
    /// Description, if the server sent one.
    pub description: Option<String>,
}

impl Negotiated {
    /// Whether the server offers this transmission flag.
    pub fn offers(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Greeting,
    ReplyHeader {
        option: u32,
    },
    ReplyData {
        option: u32,
        kind: u32,
        len: usize,
    },
    /// The answer to `EXPORT_NAME` has no header.
    Export,
    Finished,
}

/// The client's side of one handshake.
#[derive(Debug)]
pub struct Handshake {
    state: State,
    partial: Vec<u8>,
    wanted: Wanted,
    granted: Negotiated,
    no_zeroes: bool,
    told_size: bool,
    replies: u32,
}

impl Handshake {
    /// Begins a handshake; the server speaks first.
    ///
    /// # Errors
    /// A name is longer than 4096 bytes, there are more than [`crate::QUERIES_MAX`] contexts, or
    /// there are contexts without structured replies.
    pub fn new(wanted: Wanted) -> Result<Handshake, ClientError> {
        let long = |text: &String| text.len() > wire::STRING_BYTES_MAX;
        if long(&wanted.export) || wanted.contexts.iter().any(long) {
            return Err(ClientError::Usage("an export or context name is longer than 4096 bytes"));
        }
        if wanted.contexts.len() > crate::QUERIES_MAX {
            return Err(ClientError::Usage("too many metadata contexts"));
        }
        if !wanted.contexts.is_empty() && !wanted.structured {
            return Err(ClientError::Usage("metadata contexts need structured replies"));
        }
        Ok(Handshake {
            state: State::Greeting,
            partial: Vec::new(),
            wanted,
            granted: Negotiated::default(),
            no_zeroes: false,
            told_size: false,
            replies: 0,
        })
    }

    /// Takes bytes from the server and appends the bytes to send to `output`. Returns how many
    /// bytes were taken, and the result when the handshake is over; then the rest of the input
    /// holds replies to requests.
    ///
    /// # Errors
    /// The server refused, or broke the protocol. Drop the connection.
    pub fn receive(
        &mut self,
        input: &[u8],
        output: &mut Vec<u8>,
    ) -> Result<(usize, Option<Negotiated>), ClientError> {
        let mut taken = 0;
        loop {
            let need = match self.state {
                State::Greeting => GREETING_BYTES,
                State::ReplyHeader { .. } => REPLY_HEADER_BYTES,
                State::ReplyData { len, .. } => len,
                State::Export if self.no_zeroes => EXPORT_BYTES,
                State::Export => EXPORT_BYTES + wire::EXPORT_NAME_ZEROES,
                State::Finished => return Err(ClientError::Usage("the handshake is over")),
            };
            let some = (need - self.partial.len()).min(input.len() - taken);
            self.partial.extend_from_slice(&input[taken..taken + some]);
            taken += some;
            if self.partial.len() < need {
                return Ok((taken, None));
            }
            let gathered = std::mem::take(&mut self.partial);
            match self.state {
                State::Greeting => self.greeting(&gathered, output)?,
                State::ReplyHeader { option } => self.reply_header(option, &gathered)?,
                State::ReplyData { option, kind, .. } => {
                    self.reply(option, kind, &gathered, output)?
                }
                State::Export => self.export(&gathered),
                State::Finished => {}
            }
            if self.state == State::Finished {
                return Ok((taken, Some(std::mem::take(&mut self.granted))));
            }
        }
    }

    fn greeting(&mut self, bytes: &[u8], output: &mut Vec<u8>) -> Result<(), ClientError> {
        let mut reader = Reader(bytes);
        if reader.u64() != Some(wire::MAGIC_GREETING) {
            return Err(ClientError::Protocol("it did not greet as an NBD server"));
        }
        match reader.u64() {
            Some(wire::MAGIC_OPTION) => {}
            Some(wire::MAGIC_OLDSTYLE) => {
                return Err(ClientError::Unsupported(
                    "the newstyle handshake (only the withdrawn oldstyle)",
                ));
            }
            _ => return Err(ClientError::Protocol("it greeted with an unknown style")),
        }
        let offered = reader.u16().unwrap_or_default();
        let flags = offered & (wire::HANDSHAKE_FIXED_NEWSTYLE | wire::HANDSHAKE_NO_ZEROES);
        self.no_zeroes = flags & wire::HANDSHAKE_NO_ZEROES != 0;
        output.extend_from_slice(&u32::from(flags).to_be_bytes());
        if flags & wire::HANDSHAKE_FIXED_NEWSTYLE == 0 {
            self.send_export_name(output);
        } else if self.wanted.structured {
            self.send(output, wire::OPT_STRUCTURED_REPLY, &[]);
        } else {
            self.send_go(output);
        }
        Ok(())
    }

    fn send(&mut self, output: &mut Vec<u8>, option: u32, data: &[u8]) {
        output.extend_from_slice(&wire::MAGIC_OPTION.to_be_bytes());
        output.extend_from_slice(&option.to_be_bytes());
        output.extend_from_slice(&(data.len() as u32).to_be_bytes());
        output.extend_from_slice(data);
        self.replies = 0;
        self.state = State::ReplyHeader { option };
    }

    fn send_export_name(&mut self, output: &mut Vec<u8>) {
        let name = self.wanted.export.clone();
        self.send(output, wire::OPT_EXPORT_NAME, name.as_bytes());
        self.state = State::Export;
    }

    fn send_go(&mut self, output: &mut Vec<u8>) {
        let mut data = string(&self.wanted.export);
        let asked = [wire::INFO_NAME, wire::INFO_DESCRIPTION, wire::INFO_BLOCK_SIZE];
        data.extend_from_slice(&(asked.len() as u16).to_be_bytes());
        asked.iter().for_each(|info| data.extend_from_slice(&info.to_be_bytes()));
        self.send(output, wire::OPT_GO, &data);
    }

    fn send_contexts(&mut self, output: &mut Vec<u8>) {
        let mut data = string(&self.wanted.export);
        data.extend_from_slice(&(self.wanted.contexts.len() as u32).to_be_bytes());
        self.wanted.contexts.iter().for_each(|context| data.extend_from_slice(&string(context)));
        self.send(output, wire::OPT_SET_META_CONTEXT, &data);
    }

    fn reply_header(&mut self, option: u32, bytes: &[u8]) -> Result<(), ClientError> {
        let mut reader = Reader(bytes);
        if reader.u64() != Some(wire::MAGIC_OPTION_REPLY) || reader.u32() != Some(option) {
            return Err(ClientError::Protocol("an option's reply does not belong to the option"));
        }
        let kind = reader.u32().unwrap_or_default();
        let len = reader.u32().unwrap_or_default() as usize;
        self.replies += 1;
        if len > REPLY_BYTES_MAX || self.replies > REPLIES_MAX {
            return Err(ClientError::Protocol("an option's reply is too long"));
        }
        self.state = State::ReplyData { option, kind, len };
        Ok(())
    }

    fn reply(
        &mut self,
        option: u32,
        kind: u32,
        data: &[u8],
        output: &mut Vec<u8>,
    ) -> Result<(), ClientError> {
        self.state = State::ReplyHeader { option };
        let failed = kind & wire::REP_ERROR_BIT != 0;
        match (option, kind) {
            (_, wire::REP_ERR_TLS_REQD) => return Err(ClientError::Tls),
            (wire::OPT_GO, wire::REP_INFO) => self.info(data)?,
            (wire::OPT_GO, wire::REP_ACK) if self.told_size => self.state = State::Finished,
            (wire::OPT_GO, wire::REP_ERR_UNSUP) => self.send_export_name(output),
            (wire::OPT_GO, _) if failed => return Err(refused("the export", kind, data)),
            (wire::OPT_SET_META_CONTEXT, wire::REP_META_CONTEXT) => self.context(data)?,
            (wire::OPT_SET_META_CONTEXT, wire::REP_ACK) => self.send_go(output),
            // A refusal of contexts does not end the handshake: the result then has no contexts.
            (wire::OPT_SET_META_CONTEXT, _) if failed => {
                self.granted.contexts.clear();
                self.send_go(output);
            }
            (wire::OPT_STRUCTURED_REPLY, wire::REP_ACK) => {
                self.granted.structured = true;
                if self.wanted.contexts.is_empty() {
                    self.send_go(output);
                } else {
                    self.send_contexts(output);
                }
            }
            (wire::OPT_STRUCTURED_REPLY, _) if failed => self.send_go(output),
            _ => return Err(ClientError::Protocol("an option's reply is of an unexpected type")),
        }
        Ok(())
    }

    fn info(&mut self, data: &[u8]) -> Result<(), ClientError> {
        const MALFORMED: ClientError =
            ClientError::Protocol("a piece of export information is malformed");
        let mut reader = Reader(data);
        let text = |bytes: &[u8]| Some(String::from_utf8_lossy(bytes).into_owned());
        match reader.u16().ok_or(MALFORMED)? {
            wire::INFO_EXPORT => {
                if reader.0.len() != EXPORT_BYTES {
                    return Err(MALFORMED);
                }
                self.granted.size_bytes = reader.u64().ok_or(MALFORMED)?;
                self.granted.flags = reader.u16().ok_or(MALFORMED)?;
                self.told_size = true;
            }
            wire::INFO_NAME => self.granted.name = text(reader.0),
            wire::INFO_DESCRIPTION => self.granted.description = text(reader.0),
            wire::INFO_BLOCK_SIZE => {
                let sizes = BlockSizes {
                    min_bytes: reader.u32().ok_or(MALFORMED)?,
                    preferred_bytes: reader.u32().ok_or(MALFORMED)?,
                    payload_bytes_max: reader.u32().ok_or(MALFORMED)?,
                };
                if !sizes.min_bytes.is_power_of_two()
                    || !sizes.preferred_bytes.is_power_of_two()
                    || sizes.min_bytes > sizes.preferred_bytes
                    || sizes.preferred_bytes > sizes.payload_bytes_max
                {
                    return Err(ClientError::Protocol("its block sizes make no sense"));
                }
                self.granted.block_sizes = sizes;
            }
            _ => {}
        }
        Ok(())
    }

    fn context(&mut self, data: &[u8]) -> Result<(), ClientError> {
        let mut reader = Reader(data);
        let id = reader.u32().ok_or(ClientError::Protocol("a metadata context is malformed"))?;
        if self.granted.contexts.len() == CONTEXTS_MAX {
            return Err(ClientError::Protocol(
                "it selected more metadata contexts than were asked for",
            ));
        }
        self.granted.contexts.push((id, String::from_utf8_lossy(reader.0).into_owned()));
        Ok(())
    }

    fn export(&mut self, bytes: &[u8]) {
        let mut reader = Reader(bytes);
        self.granted.size_bytes = reader.u64().unwrap_or_default();
        self.granted.flags = reader.u16().unwrap_or_default();
        self.state = State::Finished;
    }
}

fn string(text: &str) -> Vec<u8> {
    let mut out = (text.len() as u32).to_be_bytes().to_vec();
    out.extend_from_slice(text.as_bytes());
    out
}

/// The error of a refused option. The server's message is untrusted text: it is cut to 200 bytes,
/// and control characters are escaped.
fn refused(option: &'static str, kind: u32, data: &[u8]) -> ClientError {
    let message = match std::str::from_utf8(data) {
        Ok(text) if !text.is_empty() => wire::cut(text, 200).escape_debug().to_string(),
        _ => match kind {
            wire::REP_ERR_UNSUP => "the option is unknown".to_owned(),
            wire::REP_ERR_POLICY => "forbidden by its policy".to_owned(),
            wire::REP_ERR_INVALID => "the request is malformed".to_owned(),
            wire::REP_ERR_PLATFORM => "not possible on its platform".to_owned(),
            wire::REP_ERR_UNKNOWN => "there is no such export".to_owned(),
            wire::REP_ERR_SHUTDOWN => "it is shutting down".to_owned(),
            wire::REP_ERR_BLOCK_SIZE_REQD => "it insists on block sizes".to_owned(),
            wire::REP_ERR_TOO_BIG => "the request is too large".to_owned(),
            _ => format!("error {kind:#x}"),
        },
    };
    ClientError::Refused { option, message }
}
