//! Notes on an option: how it is shown and written, and whether it is needed.

/// Remarks of a declaration on an option, beside its value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Note {
    /// Value that pages show in place of the default, as TOML.
    pub example: Option<&'static str>,
    /// True if a table without the key is refused.
    pub needed: bool,
    /// Keys of which each stands for this one.
    pub or: &'static [&'static str],
    /// True if files that are written leave out the default.
    pub later: bool,
    /// True if printed settings leave the key out.
    pub hidden: bool,
    /// True for a key of earlier versions, which neither pages nor messages show.
    pub retired: bool,
    /// Key before which it is written, if this is not its place in the declaration.
    pub before: Option<&'static str>,
}

impl Note {
    /// Nothing to note.
    pub const NONE: Note = Note {
        example: None,
        needed: false,
        or: &[],
        later: false,
        hidden: false,
        retired: false,
        before: None,
    };

    /// The key came after files were written without it: it is written only if it differs from the default, so that
    /// files of earlier versions stay equal.
    pub const LATER: Note = Note { later: true, ..Note::NONE };

    /// Printed settings do not show the key; its table has a page of its own.
    pub const HIDDEN: Note = Note { hidden: true, ..Note::NONE };

    /// Earlier versions wrote the key: it is still read and written, and shown nowhere.
    pub const RETIRED: Note = Note { retired: true, ..Note::NONE };

    /// The key has no default, or one that depends on others; pages show this value.
    pub const fn example(value: &'static str) -> Note {
        Note { example: Some(value), ..Note::NONE }
    }

    /// The key has no default and is needed; pages show this value.
    pub const fn needed(value: &'static str) -> Note {
        Note { needed: true, ..Note::example(value) }
    }

    /// The key is not needed if the table has one of these.
    #[must_use]
    pub const fn or(self, keys: &'static [&'static str]) -> Note {
        Note { or: keys, ..self }
    }

    /// As [`LATER`](Self::LATER).
    #[must_use]
    pub const fn later(self) -> Note {
        Note { later: true, ..self }
    }

    /// The key is written before `key`, as earlier versions did.
    #[must_use]
    pub const fn before(self, key: &'static str) -> Note {
        Note { before: Some(key), ..self }
    }
}
