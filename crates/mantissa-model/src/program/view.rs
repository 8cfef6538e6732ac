//! Named buffers of a pass, and parts of them.

/// Buffer of a pass. Each has a field in [`Activations`](crate::flow::Activations), or is bound to one by what follows the
/// pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Buffer {
    /// Residual stream.
    Residual,
    /// Its normed copy; results before they are normed.
    Normed,
    /// Queries.
    Queries,
    /// Keys.
    Keys,
    /// Values.
    Values,
    /// Joined heads, then the result of a recurrent mixer.
    Attended,
    /// Gate of the MLP.
    Gate,
    /// Second factor of the MLP.
    Up,
    /// Inner activation of the MLP.
    Inner,
    /// Scratch of particular blocks.
    Wide,
    /// Logits of a router, or gates of rows.
    Logits,
    /// Results of experts.
    Result,
    /// Sum of experts.
    Sum,
    /// Parallel streams of states.
    Streams,
    /// Normed heads before the output projection: scratch if a backward pass reads the queries, else their place.
    NormedHeads,
    /// Normed inner activation of the MLP: scratch if a backward pass reads the gate, else its place.
    NormedInner,
}

impl Buffer {
    /// Number of buffers that hold memory; those after them are bound to one of these.
    pub(crate) const BOUND: usize = Buffer::Streams as usize + 1;
}

/// Rows of a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// Rows of the pass, after `after` values for each of them.
    Pass {
        /// Values per row of what lies before.
        after: usize,
    },
    /// Rows of the part that runs, at the beginning of the buffer, after `after` values for each of them.
    Part {
        /// Values per row of what lies before.
        after: usize,
    },
    /// Rows of the pass if a backward pass follows, else of the part.
    Kept,
    /// Rows of the pass in one of several parallel streams.
    Stream {
        /// The stream.
        index: usize,
        /// Number of streams.
        of: usize,
    },
}

/// Some columns of rows: `[rows, width]`, dense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// Buffer that it lies in.
    pub buffer: Buffer,
    /// Its rows.
    pub rows: Rows,
    /// Values per row.
    pub width: usize,
}

impl View {
    /// Creates a view of the rows of a pass.
    pub fn new(buffer: Buffer, width: usize) -> Self {
        View { buffer, rows: Rows::Pass { after: 0 }, width }
    }

    /// Creates a view of the rows of a part.
    pub fn part(buffer: Buffer, width: usize) -> Self {
        View { buffer, rows: Rows::Part { after: 0 }, width }
    }

    /// Creates a view of rows that stay for a backward pass.
    pub fn kept(buffer: Buffer, width: usize) -> Self {
        View { buffer, rows: Rows::Kept, width }
    }

    /// Creates a view of parallel stream `index`.
    pub fn stream(index: usize, of: usize, width: usize) -> Self {
        View { buffer: Buffer::Streams, rows: Rows::Stream { index, of }, width }
    }

    /// Returns the next view of the same buffer, of another width.
    pub fn then(self, width: usize) -> Self {
        let end = self.end();
        let rows = match self.rows {
            Rows::Part { .. } => Rows::Part { after: end },
            _ => Rows::Pass { after: end },
        };
        View { rows, width, ..self }
    }

    /// Splits views of these widths, one after another, off the scratch of a pass.
    pub fn scratch<const N: usize>(widths: [usize; N]) -> [View; N] {
        let mut after = 0;
        widths.map(|width| {
            let view = View { buffer: Buffer::Wide, rows: Rows::Pass { after }, width };
            after += width;
            view
        })
    }

    /// Values per row of the buffer up to the end of the view.
    pub fn end(&self) -> usize {
        match self.rows {
            Rows::Pass { after } | Rows::Part { after } => after + self.width,
            Rows::Kept => self.width,
            Rows::Stream { index, .. } => (index + 1) * self.width,
        }
    }
}
