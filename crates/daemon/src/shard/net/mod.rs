//! Sockets: the clients' connections, and the links to other hosts.
//!
//! | file | what it is about |
//! |---|---|
//! | `answer` | From the core's answers to NBD replies |
//! | `connection` | One NBD client |
//! | `inbox` | Bytes on their way from one client |
//! | `link` | A connection to another host's daemon |
//! | `listener` | Listening sockets and the connections that they bring |
//! | `message` | The vectors of a send or a receive in flight |
//! | `outbox` | Replies on their way to one client |
//! | `places` | Who may have how many connections |
//! | `requests` | A client's requests on their way into the core, piece by piece |
//! | `secure` | TLS on a link |

pub(super) mod answer;
pub(super) mod connection;
pub(super) mod inbox;
pub(super) mod link;
pub(super) mod listener;
pub(super) mod message;
pub(super) mod outbox;
pub(super) mod places;
pub(super) mod requests;
pub(super) mod secure;
