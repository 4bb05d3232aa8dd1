//! The server's side of the handshake: fixed newstyle, fed with bytes, answering into a buffer.

use crate::context::{Context, Contexts};
use crate::export::{BlockSizes, Export, Exports};
use crate::option::{Info, Meta, Refused, export_name};
use crate::wire::{self, Reader};

/// Longest option data that is looked at; whatever is sensible fits with room to spare.
pub const OPTION_BYTES_MAX: usize = 16 << 10;
/// Longest option data that is skipped with an error reply. More is taken for an attack.
pub const OPTION_SKIP_BYTES_MAX: u32 = 1 << 20;
/// Most options of one handshake.
pub const OPTIONS_MAX: u32 = 4096;
/// Most exports that `LIST` shows.
pub const LISTED_EXPORTS_MAX: usize = 1024;
/// Longest message in an error reply.
const MESSAGE_BYTES_MAX: usize = 512;

const OPTION_HEADER_BYTES: usize = 16;
const CLIENT_FLAGS_BYTES: usize = 4;

/// Why a connection is dropped. The client is at fault; nothing can be told to it any more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// Client flags that nobody offered.
    #[error("the client set unknown handshake flags {0:#x}")]
    ClientFlags(u32),
    /// An option does not begin with its magic number.
    #[error("the client sent {0:#018x} where an option was due")]
    OptionMagic(u64),
    /// An option's data is absurdly long.
    #[error("the client announced {len} bytes of data for option {option}")]
    OptionTooLong {
        /// Which.
        option: u32,
        /// Bytes.
        len: u32,
    },
    /// The client haggles without end.
    #[error("the client sent more than {OPTIONS_MAX} options")]
    TooManyOptions,
    /// A client that does not speak fixed newstyle can send `EXPORT_NAME` only.
    #[error("the client sent option {0} without having announced fixed newstyle")]
    NotFixed(u32),
    /// `EXPORT_NAME` cannot be answered with an error.
    #[error("the client asked for export {0:?}, which is not there")]
    UnknownExport(String),
    /// `EXPORT_NAME` with something that is no name.
    #[error("the client asked for an export with a malformed name: {0}")]
    ExportName(&'static str),
    /// A request does not begin with its magic number.
    #[error("the client sent {0:#010x} where a request was due")]
    RequestMagic(u32),
    /// A write's payload is too long even to be skipped.
    #[error("the client announced a write of {0} bytes")]
    PayloadTooLong(u32),
}

/// What was agreed on with a client; valid from the handshake to the end of the connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Session {
    /// [`Export::id`] of the export that the client chose.
    pub export: u64,
    /// Its name.
    pub name: String,
    /// Its size. Requests are checked against it.
    pub size_bytes: u64,
    /// The transmission flags that the client was shown.
    pub flags: u16,
    /// Reads are answered with structured replies.
    pub structured: bool,
    /// The metadata contexts that the client selected.
    pub contexts: Contexts,
    /// Its size constraints.
    pub block_sizes: BlockSizes,
}

/// How far the handshake has come.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// More is to come. Bytes left over are fed again while the output is short, or once it is written: a client that
    /// sends options without reading the replies fills its own pipe, not the server's memory.
    Continue,
    /// The client asks for an export that is on its way. Feed what is left, or nothing, when the export may be there or is not
    /// waited for any more.
    Wait,
    /// The client gave up. Write the output and close.
    Closed,
    /// Write the output; what follows in the input are requests.
    Transmission(Session),
}

/// What the bytes gathered so far belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    ClientFlags,
    OptionHeader,
    OptionData { option: u32, len: usize },
    Skip { option: u32, left: u32 },
    Finished,
}

/// The server's side of one handshake.
///
/// Holds at most one option's data ([`OPTION_BYTES_MAX`]) and writes at most the reply to one option
/// per call.
#[derive(Debug)]
pub struct Handshake {
    state: State,
    partial: Vec<u8>,
    fixed: bool,
    no_zeroes: bool,
    structured: bool,
    /// Contexts of the last `SET_META_CONTEXT` and the name that it was sent for: they hold for
    /// exactly that name.
    contexts: Contexts,
    contexts_name: String,
    options: u32,
    shutdown: bool,
}

impl Handshake {
    /// Begins a handshake by writing the server's greeting.
    pub fn new(output: &mut Vec<u8>) -> Handshake {
        output.extend_from_slice(&wire::MAGIC_GREETING.to_be_bytes());
        output.extend_from_slice(&wire::MAGIC_OPTION.to_be_bytes());
        let flags = wire::HANDSHAKE_FIXED_NEWSTYLE | wire::HANDSHAKE_NO_ZEROES;
        output.extend_from_slice(&flags.to_be_bytes());
        Handshake {
            state: State::ClientFlags,
            partial: Vec::new(),
            fixed: false,
            no_zeroes: false,
            structured: false,
            contexts: Contexts::NONE,
            contexts_name: String::new(),
            options: 0,
            shutdown: false,
        }
    }

    /// From now on every option but `ABORT` is answered with "shutting down".
    pub fn shut_down(&mut self) {
        self.shutdown = true;
    }

    /// Bytes that are held for an unfinished option.
    pub fn buffered_bytes(&self) -> usize {
        self.partial.capacity() + self.contexts_name.capacity()
    }

    /// Takes bytes from the client, up to the end of one option, and appends the reply to `output`.
    /// Returns how many bytes were taken.
    ///
    /// # Errors
    /// What the client did wrong. Write the output, then drop the connection.
    pub fn receive<E: Exports + ?Sized>(
        &mut self,
        input: &[u8],
        exports: &E,
        output: &mut Vec<u8>,
    ) -> Result<(usize, Step), ProtocolError> {
        let mut taken = 0;
        loop {
            let need = match self.state {
                State::ClientFlags => CLIENT_FLAGS_BYTES,
                State::OptionHeader => OPTION_HEADER_BYTES,
                State::OptionData { len, .. } => len,
                State::Skip { option, left } => {
                    let skipped = (left as usize).min(input.len() - taken);
                    taken += skipped;
                    let left = left - skipped as u32;
                    self.state = State::Skip { option, left };
                    if left == 0 {
                        self.state = State::OptionHeader;
                        refuse_skipped(output, option);
                    }
                    return Ok((taken, Step::Continue));
                }
                State::Finished => return Ok((taken, Step::Closed)),
            };
            let some = (need - self.partial.len()).min(input.len() - taken);
            // Exactly: growing by doubling could hold twice the bound.
            self.partial.reserve_exact(need - self.partial.len());
            self.partial.extend_from_slice(&input[taken..taken + some]);
            taken += some;
            if self.partial.len() < need {
                return Ok((taken, Step::Continue));
            }
            let gathered = std::mem::take(&mut self.partial);
            match self.state {
                State::ClientFlags => self.client_flags(&gathered)?,
                State::OptionHeader => self.option_header(&gathered)?,
                State::OptionData { option, .. }
                    if !self.shutdown && is_early(option, &gathered, exports) =>
                {
                    self.partial = gathered;
                    return Ok((taken, Step::Wait));
                }
                State::OptionData { option, .. } => {
                    self.state = State::OptionHeader;
                    let step = self.option(option, &gathered, exports, output)?;
                    if step != Step::Continue {
                        self.state = State::Finished;
                    }
                    return Ok((taken, step));
                }
                State::Skip { .. } | State::Finished => {}
            }
        }
    }

    fn client_flags(&mut self, bytes: &[u8]) -> Result<(), ProtocolError> {
        let flags = Reader(bytes).u32().unwrap_or_default();
        let (fixed, no_zeroes) =
            (u32::from(wire::HANDSHAKE_FIXED_NEWSTYLE), u32::from(wire::HANDSHAKE_NO_ZEROES));
        if flags & !(fixed | no_zeroes) != 0 {
            return Err(ProtocolError::ClientFlags(flags));
        }
        self.fixed = flags & fixed != 0;
        self.no_zeroes = flags & no_zeroes != 0;
        self.state = State::OptionHeader;
        Ok(())
    }

    fn option_header(&mut self, bytes: &[u8]) -> Result<(), ProtocolError> {
        let mut reader = Reader(bytes);
        let (magic, option, len) = (
            reader.u64().unwrap_or_default(),
            reader.u32().unwrap_or_default(),
            reader.u32().unwrap_or_default(),
        );
        if magic != wire::MAGIC_OPTION {
            return Err(ProtocolError::OptionMagic(magic));
        }
        if !self.fixed && option != wire::OPT_EXPORT_NAME {
            return Err(ProtocolError::NotFixed(option));
        }
        self.options += 1;
        if self.options > OPTIONS_MAX {
            return Err(ProtocolError::TooManyOptions);
        }
        if len as usize <= OPTION_BYTES_MAX {
            self.state = State::OptionData { option, len: len as usize };
        } else if len <= OPTION_SKIP_BYTES_MAX && option != wire::OPT_EXPORT_NAME {
            self.state = State::Skip { option, left: len };
        } else {
            return Err(ProtocolError::OptionTooLong { option, len });
        }
        Ok(())
    }

    fn option<E: Exports + ?Sized>(
        &mut self,
        option: u32,
        data: &[u8],
        exports: &E,
        output: &mut Vec<u8>,
    ) -> Result<Step, ProtocolError> {
        if option == wire::OPT_ABORT {
            reply(output, option, wire::REP_ACK, &[]);
            return Ok(Step::Closed);
        }
        if option == wire::OPT_EXPORT_NAME {
            return self.export_name(data, exports, output);
        }
        let replied = if self.shutdown {
            Err(Refused { reply: wire::REP_ERR_SHUTDOWN, message: "the server is shutting down" })
        } else {
            self.fixed_option(option, data, exports, output)
        };
        match replied {
            Ok(step) => Ok(step),
            Err(refused) => {
                refuse(output, option, refused);
                Ok(Step::Continue)
            }
        }
    }

    /// The options that are answered in the fixed newstyle format.
    fn fixed_option<E: Exports + ?Sized>(
        &mut self,
        option: u32,
        data: &[u8],
        exports: &E,
        output: &mut Vec<u8>,
    ) -> Result<Step, Refused> {
        match option {
            wire::OPT_LIST => {
                without_data(data)?;
                list(exports, output);
            }
            wire::OPT_STARTTLS => {
                without_data(data)?;
                return Err(Refused {
                    reply: wire::REP_ERR_UNSUP,
                    message: "this server does not offer TLS",
                });
            }
            wire::OPT_STRUCTURED_REPLY => {
                without_data(data)?;
                self.structured = true;
                reply(output, option, wire::REP_ACK, &[]);
            }
            wire::OPT_INFO | wire::OPT_GO => return self.info(option, data, exports, output),
            wire::OPT_LIST_META_CONTEXT => self.list_contexts(data, exports, output)?,
            wire::OPT_SET_META_CONTEXT => self.set_contexts(data, exports, output)?,
            _ => return Err(Refused { reply: wire::REP_ERR_UNSUP, message: "unknown option" }),
        }
        Ok(Step::Continue)
    }

    fn export_name<E: Exports + ?Sized>(
        &mut self,
        data: &[u8],
        exports: &E,
        output: &mut Vec<u8>,
    ) -> Result<Step, ProtocolError> {
        let name = export_name(data).map_err(|refused| ProtocolError::ExportName(refused.message))?;
        let export = if self.shutdown { None } else { exports.find(name) };
        let Some(export) = export else {
            return Err(ProtocolError::UnknownExport(wire::cut(name, MESSAGE_BYTES_MAX).to_owned()));
        };
        output.extend_from_slice(&export.size_bytes.to_be_bytes());
        output.extend_from_slice(&export.transmission_flags(self.structured).to_be_bytes());
        if !self.no_zeroes {
            output.extend_from_slice(&[0; wire::EXPORT_NAME_ZEROES]);
        }
        Ok(Step::Transmission(self.session(name, &export)))
    }

    fn info<E: Exports + ?Sized>(
        &mut self,
        option: u32,
        data: &[u8],
        exports: &E,
        output: &mut Vec<u8>,
    ) -> Result<Step, Refused> {
        let info = Info::parse(data)?;
        let Some(export) = exports.find(info.name) else {
            unknown_export(output, option, info.name);
            return Ok(Step::Continue);
        };
        let mut size = [0; 12];
        wire::Writer::new(&mut size)
            .u16(wire::INFO_EXPORT)
            .u64(export.size_bytes)
            .u16(export.transmission_flags(self.structured));
        reply(output, option, wire::REP_INFO, &[&size]);
        if info.asks(wire::INFO_NAME) {
            let name = wire::cut(export.name, wire::STRING_BYTES_MAX);
            reply(output, option, wire::REP_INFO, &[&wire::INFO_NAME.to_be_bytes(), name.as_bytes()]);
        }
        if info.asks(wire::INFO_DESCRIPTION) && !export.description.is_empty() {
            let text = wire::cut(export.description, wire::STRING_BYTES_MAX);
            reply(output, option, wire::REP_INFO, &[&wire::INFO_DESCRIPTION.to_be_bytes(), text.as_bytes()]);
        }
        let sizes = export.block_sizes;
        if info.asks(wire::INFO_BLOCK_SIZE) || sizes != BlockSizes::default() {
            let mut constraints = [0; 14];
            wire::Writer::new(&mut constraints)
                .u16(wire::INFO_BLOCK_SIZE)
                .u32(sizes.min_bytes)
                .u32(sizes.preferred_bytes)
                .u32(sizes.payload_bytes_max);
            reply(output, option, wire::REP_INFO, &[&constraints]);
        }
        reply(output, option, wire::REP_ACK, &[]);
        if option == wire::OPT_GO {
            return Ok(Step::Transmission(self.session(info.name, &export)));
        }
        Ok(Step::Continue)
    }

    fn list_contexts<E: Exports + ?Sized>(
        &self,
        data: &[u8],
        exports: &E,
        output: &mut Vec<u8>,
    ) -> Result<(), Refused> {
        let option = wire::OPT_LIST_META_CONTEXT;
        let meta = self.meta(data)?;
        if exports.find(meta.name).is_none() {
            unknown_export(output, option, meta.name);
            return Ok(());
        }
        let mut found = if meta.count == 0 { Contexts::ALL } else { Contexts::NONE };
        meta.queries().for_each(|query| found.find(query));
        // Ids mean nothing in a list and are zero there.
        contexts(output, option, found, |_| 0);
        Ok(())
    }

    fn set_contexts<E: Exports + ?Sized>(
        &mut self,
        data: &[u8],
        exports: &E,
        output: &mut Vec<u8>,
    ) -> Result<(), Refused> {
        let option = wire::OPT_SET_META_CONTEXT;
        // The former selection is void even when this one fails.
        self.contexts = Contexts::NONE;
        self.contexts_name = String::new();
        let meta = self.meta(data)?;
        if exports.find(meta.name).is_none() {
            unknown_export(output, option, meta.name);
            return Ok(());
        }
        meta.queries().for_each(|query| self.contexts.select(query));
        self.contexts_name = meta.name.to_owned();
        contexts(output, option, self.contexts, Context::id);
        Ok(())
    }

    fn meta<'a>(&self, data: &'a [u8]) -> Result<Meta<'a>, Refused> {
        if !self.structured {
            return Err(Refused {
                reply: wire::REP_ERR_INVALID,
                message: "metadata contexts need structured replies: negotiate them first",
            });
        }
        Meta::parse(data)
    }

    /// What the client gets that chose `export` by `name`.
    fn session(&self, name: &str, export: &Export<'_>) -> Session {
        let contexts = if self.contexts_name == name { self.contexts } else { Contexts::NONE };
        Session {
            export: export.id,
            name: export.name.to_owned(),
            size_bytes: export.size_bytes,
            flags: export.transmission_flags(self.structured),
            structured: self.structured,
            contexts,
            block_sizes: export.block_sizes,
        }
    }
}

/// Whether an option asks for an export that is on its way.
fn is_early<E: Exports + ?Sized>(option: u32, data: &[u8], exports: &E) -> bool {
    let name = match option {
        wire::OPT_EXPORT_NAME => export_name(data),
        wire::OPT_INFO | wire::OPT_GO => Info::parse(data).map(|info| info.name),
        wire::OPT_LIST_META_CONTEXT | wire::OPT_SET_META_CONTEXT => Meta::parse(data).map(|meta| meta.name),
        _ => return false,
    };
    name.is_ok_and(|name| exports.find(name).is_none() && exports.is_coming(name))
}

fn without_data(data: &[u8]) -> Result<(), Refused> {
    if data.is_empty() {
        return Ok(());
    }
    Err(Refused { reply: wire::REP_ERR_INVALID, message: "the option takes no data" })
}

fn list<E: Exports + ?Sized>(exports: &E, output: &mut Vec<u8>) {
    let mut listed = 0;
    exports.list(&mut |export| {
        if listed == LISTED_EXPORTS_MAX || export.name.len() > wire::STRING_BYTES_MAX {
            return;
        }
        listed += 1;
        let len = (export.name.len() as u32).to_be_bytes();
        let text = wire::cut(export.description, wire::STRING_BYTES_MAX);
        reply(output, wire::OPT_LIST, wire::REP_SERVER, &[&len, export.name.as_bytes(), text.as_bytes()]);
    });
    reply(output, wire::OPT_LIST, wire::REP_ACK, &[]);
}

fn contexts(output: &mut Vec<u8>, option: u32, selected: Contexts, id: impl Fn(Context) -> u32) {
    for context in selected.iter() {
        let id = id(context).to_be_bytes();
        reply(output, option, wire::REP_META_CONTEXT, &[&id, context.name().as_bytes()]);
    }
    reply(output, option, wire::REP_ACK, &[]);
}

fn unknown_export(output: &mut Vec<u8>, option: u32, name: &str) {
    let message = format!("there is no export {name:?}");
    let message = wire::cut(&message, MESSAGE_BYTES_MAX);
    reply(output, option, wire::REP_ERR_UNKNOWN, &[message.as_bytes()]);
}

/// The error for an option whose data was too long to look at.
fn refuse_skipped(output: &mut Vec<u8>, option: u32) {
    let known = option <= wire::OPT_SET_META_CONTEXT;
    let refused = if known {
        Refused { reply: wire::REP_ERR_TOO_BIG, message: "the option's data is too long" }
    } else {
        Refused { reply: wire::REP_ERR_UNSUP, message: "unknown option" }
    };
    refuse(output, option, refused);
}

fn refuse(output: &mut Vec<u8>, option: u32, refused: Refused) {
    reply(output, option, refused.reply, &[refused.message.as_bytes()]);
}

fn reply(output: &mut Vec<u8>, option: u32, kind: u32, parts: &[&[u8]]) {
    let len: usize = parts.iter().map(|part| part.len()).sum();
    output.extend_from_slice(&wire::MAGIC_OPTION_REPLY.to_be_bytes());
    output.extend_from_slice(&option.to_be_bytes());
    output.extend_from_slice(&kind.to_be_bytes());
    output.extend_from_slice(&(len as u32).to_be_bytes());
    parts.iter().for_each(|part| output.extend_from_slice(part));
}
