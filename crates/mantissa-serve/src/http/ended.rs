//! Bodies that tell when they have ended: the time of an answer is that of its last byte.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use http_body::{Frame, SizeHint};

/// Calls a function once when a body has been written, or dropped before; true if it was written whole.
pub(super) struct Ended<F: FnOnce(bool)> {
    body: Body,
    tell: Option<F>,
}

impl<F: FnOnce(bool) + Send + Unpin + 'static> Ended<F> {
    /// Makes a body that calls `tell` at its end.
    pub(super) fn body(body: Body, tell: F) -> Body {
        Body::new(Ended { body, tell: Some(tell) })
    }
}

impl<F: FnOnce(bool)> Ended<F> {
    fn tell(&mut self, whole: bool) {
        if let Some(tell) = self.tell.take() {
            tell(whole);
        }
    }
}

impl<F: FnOnce(bool) + Unpin> HttpBody for Ended<F> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        match &polled {
            Poll::Ready(None) => self.tell(true),
            // Nobody asks for what comes after the last frame of a known length.
            Poll::Ready(Some(Ok(_))) if self.body.is_end_stream() => self.tell(true),
            _ => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl<F: FnOnce(bool)> Drop for Ended<F> {
    fn drop(&mut self) {
        // A body without bytes is never asked for any.
        let whole = self.body.is_end_stream();
        self.tell(whole);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::{Arc, Mutex};

    use http_body_util::BodyExt;

    use super::*;

    type Told = Arc<Mutex<Vec<bool>>>;

    fn told_of(body: Body) -> (Body, Told) {
        let told = Told::default();
        let own = Arc::clone(&told);
        (Ended::body(body, move |whole| own.lock().unwrap().push(whole)), told)
    }

    #[tokio::test]
    async fn the_end_of_a_body_is_told_once() {
        for bytes in ["", "text"] {
            let (body, told) = told_of(Body::from(bytes));
            assert_eq!(body.size_hint().exact(), Some(bytes.len() as u64));
            assert_eq!(body.collect().await.unwrap().to_bytes(), bytes);
            assert_eq!(*told.lock().unwrap(), [true]);
        }
        let (empty, told) = told_of(Body::empty());
        drop(empty);
        assert_eq!(*told.lock().unwrap(), [true]);
        let (body, told) = told_of(Body::from("text"));
        drop(body);
        assert_eq!(*told.lock().unwrap(), [false]);
    }
}
