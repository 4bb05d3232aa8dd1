//! A listener that has only so many connections open at once; further ones wait to be accepted.

use axum::serve::Listener;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A listener with a bound.
pub struct Bounded<L> {
    listener: L,
    places: Arc<Semaphore>,
}

/// A connection that occupies a place until it is closed.
pub struct Placed<C> {
    connection: C,
    _place: OwnedSemaphorePermit,
}

impl<L> Bounded<L> {
    /// At most `connections_max` connections at once.
    pub fn new(listener: L, connections_max: usize) -> Bounded<L> {
        Bounded { listener, places: Arc::new(Semaphore::new(connections_max)) }
    }
}

impl<L: Listener> Listener for Bounded<L> {
    type Io = Placed<L::Io>;
    type Addr = L::Addr;

    async fn accept(&mut self) -> (Placed<L::Io>, L::Addr) {
        let place = self.places.clone().acquire_owned().await.expect("the semaphore is never closed");
        let (connection, address) = self.listener.accept().await;
        (Placed { connection, _place: place }, address)
    }

    fn local_addr(&self) -> io::Result<L::Addr> {
        self.listener.local_addr()
    }
}

impl<C: AsyncRead + Unpin> AsyncRead for Placed<C> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_read(cx, buf)
    }
}

impl<C: AsyncWrite + Unpin> AsyncWrite for Placed<C> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.connection).poll_write(cx, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_shutdown(cx)
    }
}
