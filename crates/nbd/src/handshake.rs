//! The server's side of the fixed newstyle handshake: takes bytes and appends replies to a buffer.

use crate::context::{Context, Contexts};
use crate::export::{BlockSizes, Export, Exports};
use crate::option::{Info, Meta, Refused, export_name};
use crate::wire::{self, Reader};

/// Longest option data in bytes that is decoded; sensible options are far shorter.
pub const OPTION_BYTES_MAX: usize = 16 << 10;
/// Longest option data in bytes that is skipped and answered with an error. Longer data counts as
/// an attack and ends the connection.
pub const OPTION_SKIP_BYTES_MAX: u32 = 1 << 20;
/// Most options in one handshake.
pub const OPTIONS_MAX: u32 = 4096;
/// Most exports in the reply to `LIST`.
pub const LISTED_EXPORTS_MAX: usize = 1024;
/// Longest text in bytes about an unknown export: in an error reply and in a [`ProtocolError`].
const MESSAGE_BYTES_MAX: usize = 512;

const OPTION_HEADER_BYTES: usize = 16;
const CLIENT_FLAGS_BYTES: usize = 4;

/// Why the server drops a connection. The client broke the protocol, or the protocol has no reply
/// that could report the error.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// The client set handshake flags that the server did not offer.
    #[error("the client set unknown handshake flags {0:#x}")]
    ClientFlags(u32),
    /// An option does not begin with its magic number.
    #[error("the client sent {0:#018x} where an option was due")]
    OptionMagic(u64),
    /// An option announces more than [`OPTION_SKIP_BYTES_MAX`] bytes of data, or `EXPORT_NAME` more
    /// than [`OPTION_BYTES_MAX`].
    #[error("the client announced {len} bytes of data for option {option}")]
    OptionTooLong {
        /// Number of the option.
        option: u32,
        /// Announced length in bytes.
        len: u32,
    },
    /// The client sent more than [`OPTIONS_MAX`] options.
    #[error("the client sent more than {OPTIONS_MAX} options")]
    TooManyOptions,
    /// A client that did not announce fixed newstyle sent an option other than `EXPORT_NAME`.
    #[error("the client sent option {0} without having announced fixed newstyle")]
    NotFixed(u32),
    /// `EXPORT_NAME` asked for an unknown export, or for any export while the server shuts down.
    /// The protocol has no error reply to this option.
    #[error("the client asked for export {0:?}, which is not there")]
    UnknownExport(String),
    /// `EXPORT_NAME` came with a malformed name.
    #[error("the client asked for an export with a malformed name: {0}")]
    ExportName(&'static str),
    /// A request does not begin with its magic number.
    #[error("the client sent {0:#010x} where a request was due")]
    RequestMagic(u32),
    /// A write announces a payload that is too long even to be skipped.
    #[error("the client announced a write of {0} bytes")]
    PayloadTooLong(u32),
}

/// The result of a handshake; valid until the end of the connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Session {
    /// [`Export::id`] of the export that the client chose.
    pub export: u64,
    /// Name of the export.
    pub name: String,
    /// Size of the export in bytes. Requests are checked against this size.
    pub size_bytes: u64,
    /// The transmission flags that were sent to the client.
    pub flags: u16,
    /// Whether reads are answered with structured replies.
    pub structured: bool,
    /// The metadata contexts that the client selected.
    pub contexts: Contexts,
    /// Size constraints of the export.
    pub block_sizes: BlockSizes,
}

/// How far the handshake has come.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// The handshake goes on. The caller passes the bytes that were not taken to the next call, but
    /// only while the output is short or after the output was written. So a client that sends
    /// options without reading the replies fills its own socket buffer, not the server's memory.
    Continue,
    /// The client asks for an export that is not there yet ([`Exports::is_coming`]). Call
    /// [`Handshake::receive`] again when the export may be there, or when the server gives up
    /// waiting for the export. The input of that call is the rest of the bytes, which may be empty.
    Wait,
    /// The client aborted the handshake. Write the output and close the connection.
    Closed,
    /// The client chose an export. Write the output; the rest of the input holds requests.
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
/// Holds the data of at most one option ([`OPTION_BYTES_MAX`]) and one export name. Each call
/// appends the replies to at most one option.
#[derive(Debug)]
pub struct Handshake {
    state: State,
    partial: Vec<u8>,
    fixed: bool,
    no_zeroes: bool,
    structured: bool,
    /// The contexts that the last `SET_META_CONTEXT` selected, and the export name in that option.
    /// The contexts are valid only for exactly this name.
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

    /// From now on every decoded option is answered with "shutting down", except `ABORT`, which is
    /// acknowledged, and `EXPORT_NAME`, which ends in [`ProtocolError::UnknownExport`].
    pub fn shut_down(&mut self) {
        self.shutdown = true;
    }

    /// Bytes of memory held for an unfinished option and for the export name of the last
    /// `SET_META_CONTEXT`.
    pub fn buffered_bytes(&self) -> usize {
        self.partial.capacity() + self.contexts_name.capacity()
    }

    /// Takes bytes from the client, at most up to the end of one option, and appends the replies to
    /// `output`. Returns how many bytes were taken.
    ///
    /// # Errors
    /// See [`ProtocolError`]. Write the output, then drop the connection.
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
            // A buffer that grows by doubling could hold twice the limit, so the exact size is
            // reserved.
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
        let name =
            export_name(data).map_err(|refused| ProtocolError::ExportName(refused.message))?;
        let export = if self.shutdown { None } else { exports.find(name) };
        let Some(export) = export else {
            return Err(ProtocolError::UnknownExport(
                wire::cut(name, MESSAGE_BYTES_MAX).to_owned(),
            ));
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
            reply(
                output,
                option,
                wire::REP_INFO,
                &[&wire::INFO_NAME.to_be_bytes(), name.as_bytes()],
            );
        }
        if info.asks(wire::INFO_DESCRIPTION) && !export.description.is_empty() {
            let text = wire::cut(export.description, wire::STRING_BYTES_MAX);
            reply(
                output,
                option,
                wire::REP_INFO,
                &[&wire::INFO_DESCRIPTION.to_be_bytes(), text.as_bytes()],
            );
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
        // Ids have no meaning in a list, so they are zero.
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
        // `SET_META_CONTEXT` cancels the former selection even when the option fails.
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

    /// The session of a client that chose `export` by `name`.
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

/// Whether an option names an export that is not there yet but is expected
/// ([`Exports::is_coming`]).
fn is_early<E: Exports + ?Sized>(option: u32, data: &[u8], exports: &E) -> bool {
    let name = match option {
        wire::OPT_EXPORT_NAME => export_name(data),
        wire::OPT_INFO | wire::OPT_GO => Info::parse(data).map(|info| info.name),
        wire::OPT_LIST_META_CONTEXT | wire::OPT_SET_META_CONTEXT => {
            Meta::parse(data).map(|meta| meta.name)
        }
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
        reply(
            output,
            wire::OPT_LIST,
            wire::REP_SERVER,
            &[&len, export.name.as_bytes(), text.as_bytes()],
        );
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

/// The error for an option whose data was too long to be decoded.
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
