//! The declaration of options.

/// Declares a struct of options. An entry is an option: its meaning, name, type, default, the kind of its values
/// ([`Accepts`](crate::Accepts)), for example [`Count`](crate::Count), and a [`Note`](crate::Note) if there is more to
/// say. The default of the type may be left out. An entry without a kind is a field that files do not set;
/// `..field: Type, "Documentation.";` before all entries takes over the options of another such struct.
///
/// ```
/// use mantissa_options::{Count, Flag, Note, Text, options};
///
/// options! {
///     /// Options of a method.
///     #[derive(Clone, Debug, PartialEq)]
///     pub struct Rounds {
///         /// Steps of each layer.
///         steps: usize = 100, Count(1_000_000);
///         /// Rounds half to even.
///         even: bool = true, Flag;
///         /// Where the result goes.
///         out: String, Text, Note::needed("\"out\"");
///     }
/// }
///
/// # fn main() -> Result<(), String> {
/// let options: Rounds = mantissa_options::from_toml("steps = 7\nout = \"a\"")?;
/// assert_eq!(options, Rounds { steps: 7, even: true, out: "a".to_owned() });
/// let error = mantissa_options::from_toml::<Rounds>("step = 7\nout = \"a\"").unwrap_err();
/// assert_eq!(error, "step: expected steps, even, out, got an unknown key; did you mean \"steps\"?");
/// # Ok(())
/// # }
/// ```
#[macro_export]
macro_rules! options {
    (
        $(#[$about:meta])+
        $vis:vis struct $name:ident {
            $(..$base:ident: $base_type:ty, $base_help:literal;)?
            $(
                $(#[doc = $help:literal])+
                $field:ident: $type:ty $(= $default:expr)? $(, $kind:expr $(, $note:expr)?)?;
            )+
        }
    ) => {
        $(#[$about])+
        $vis struct $name {
            $(#[doc = $base_help] pub $base: $base_type,)?
            $($(#[doc = $help])+ pub $field: $type,)+
        }

        impl Default for $name {
            fn default() -> Self {
                $name {
                    $($base: <$base_type>::default(),)?
                    $($field: $crate::options!(@default $type $(, $default)?),)+
                }
            }
        }

        impl $crate::Declared for $name {
            fn keys(&self) -> Vec<$crate::Key> {
                let base: &[Vec<$crate::Key>] = &[$($crate::Declared::keys(&self.$base))?];
                let own: Vec<Option<$crate::Key>> = vec![$($crate::options!(
                    @key $field, $type, &self.$field, concat!($($help),+) $(, $kind $(, $note)?)?
                )),+];
                base.iter().flatten().cloned().chain(own.into_iter().flatten()).collect()
            }

            fn take(&mut self, table: &$crate::Table, at: &str, faults: &mut $crate::Faults) {
                $($crate::Declared::take(&mut self.$base, table, at, faults);)?
                $($($crate::expansion::take::<$type>(
                    &mut self.$field, stringify!($field), &$kind, (table, at), faults,
                );)?)+
            }

            fn entries(&self) -> Vec<(&'static str, $crate::Written)> {
                let default = Self::default();
                let base: &[Vec<(&'static str, $crate::Written)>] =
                    &[$($crate::Declared::entries(&self.$base))?];
                let own = vec![$($($crate::expansion::entry::<$type>(
                    stringify!($field),
                    &$kind,
                    (&self.$field, &default.$field),
                    $crate::options!(@note $($note)?),
                ),)?)+];
                base.iter().flatten().cloned().chain($crate::expansion::ordered(own)).collect()
            }
        }
    };
    (@default $type:ty) => {
        <$type as Default>::default()
    };
    (@default $type:ty, $default:expr) => {
        $default
    };
    (@note) => {
        $crate::Note::NONE
    };
    (@note $note:expr) => {
        $note
    };
    (@key $field:ident, $type:ty, $value:expr, $help:expr) => {
        None
    };
    (@key $field:ident, $type:ty, $value:expr, $help:expr, $kind:expr $(, $note:expr)?) => {
        Some(
            $crate::expansion::key::<$type>(stringify!($field), &$kind, $value, $help)
                .noted($crate::options!(@note $($note)?)),
        )
    };
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use crate::{
        AtLeast, Count, Declared, Faults, Flag, ListOf, Note, Number, OneOf, Seed, Subtable, Text, Texts,
        Unset, Within, from_toml, read, sections, settings, to_toml,
    };

    const SIDES: [(&str, u8); 2] = [("left", 0), ("right", 1)];

    options! {
        /// Options of every kind.
        #[derive(Debug, PartialEq)]
        pub struct Inner {
            /// Number of
            /// steps.
            steps: usize = 3, Count(10);
            /// Not an option.
            fixed: u8 = 7;
            /// Seed.
            seed: u64 = 0, Seed;
        }
    }

    options! {
        /// Options of every kind, and the options of another struct.
        #[derive(Debug, PartialEq)]
        pub struct Outer {
            ..inner: Inner, "Inner options.";
            /// Rate.
            rate: f32 = 0.1, Number(2.0);
            /// Damping.
            damp: f64 = 0.5, Number(1.0);
            /// Switch.
            on: bool = false, Flag;
            /// Side.
            side: u8 = 0, OneOf(&SIDES);
            /// Side that is unset.
            other: Option<u8>, Unset(OneOf(&SIDES));
        }
    }

    options! {
        /// Table of a settings file.
        #[derive(Debug, PartialEq)]
        pub struct Data {
            /// the texts
            files: Vec<String>, Texts, Note::needed("[\"a.txt\"]");
            /// size of a batch
            batch: usize = 4, AtLeast(1);
            /// separator
            split: Option<String>, Unset(Text), Note::example("\"|\"");
            /// newer than the others
            eps: f64 = 1e-8, Within(0.0, 1.0), Note::LATER.before("batch");
        }
    }

    options! {
        /// Settings file.
        #[derive(Debug, PartialEq)]
        pub struct File {
            /// name of the run
            name: String, Text, Note::needed("\"run\"").or(&["seed"]);
            /// seed of the numbers
            seed: u64 = 0, AtLeast(0), Note::LATER;
            /// The data.
            data: Data, Subtable("what is read");
            /// More data.
            more: Option<Data>, Unset(Subtable(""));
            /// Lists of data.
            lists: Vec<Data>, ListOf { item: Subtable(""), most: 2, allowed: "[[lists]] tables" }, Note::LATER;
        }
    }

    #[test]
    fn values_read_back_in_the_order_of_the_declaration() {
        let text =
            "steps = 7\nseed = 9\nrate = 0.3\ndamp = 1.0\non = true\nside = \"right\"\nother = \"left\"";
        let options: Outer = from_toml(text).unwrap();
        let inner = Inner { steps: 7, fixed: 7, seed: 9 };
        assert_eq!(options, Outer { inner, rate: 0.3, damp: 1.0, on: true, side: 1, other: Some(0) });
        let lines = |options: &Outer| {
            let lines = settings(&[("t", options)]);
            lines.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(lines(&options), text.lines().map(|line| format!("t.{line}")).collect::<Vec<_>>());
        let whole: Outer = from_toml("rate = 1\ndamp = 1").unwrap();
        assert_eq!(whole, Outer { rate: 1.0, damp: 1.0, ..Outer::default() });
        assert!(lines(&whole).contains(&"t.rate = 1.0".to_owned()));
        // An option without a value has no line, but is a key.
        assert_eq!((lines(&Outer::default()).len(), options.keys().len()), (6, 7));
        assert_eq!(options.keys()[0].help, "Number of steps");
    }

    #[test]
    fn other_values_are_refused_with_those_accepted() {
        for (text, allowed) in [
            ("steps = 0", "a whole number from 1 to 10"),
            ("steps = 11", "a whole number from 1 to 10"),
            ("steps = 1.0", "a whole number from 1 to 10"),
            ("seed = -1", "an integer of at least 0"),
            ("rate = 3", "a number from 0 to 2"),
            ("rate = nan", "a number from 0 to 2"),
            ("damp = 1.5", "a number from 0 to 1"),
            ("on = 1", "true or false"),
            ("side = \"up\"", "left, right"),
            ("other = 0", "left, right"),
        ] {
            let (key, found) = text.split_once(" = ").unwrap();
            let error = from_toml::<Outer>(text).unwrap_err();
            assert_eq!(error, format!("{key}: expected {allowed}, got {found}"));
        }
    }

    #[test]
    fn faults_of_all_tables_are_found() {
        let text =
            "sed = 1\nmore = 1\n[data]\nbatch = 0\nfils = []\n[[lists]]\nfiles = []\n[[lists]]\nfiles = 1";
        let mut faults = Faults::default();
        let file: File = read(&text.parse().unwrap(), "", &mut faults);
        let unknown: Vec<_> = faults.unknown.iter().map(|key| key.path() + &key.suggestion()).collect();
        assert_eq!(unknown, ["data.fils; did you mean \"files\"?", "sed; did you mean \"seed\"?"]);
        assert_eq!(faults.unknown[0].known, ["files", "batch", "split", "eps"]);
        let missing: Vec<_> = faults.missing.iter().map(|key| (&*key.key, key.example)).collect();
        assert_eq!(missing, [("data.files", "[\"a.txt\"]"), ("name", "\"run\"")]);
        assert_eq!(faults.missing[1].or, ["seed"]);
        let refused: Vec<_> =
            faults.refused.iter().map(|value| format!("{}: {}", value.key, value.refusal)).collect();
        assert_eq!(
            refused,
            [
                "data.batch: expected a whole number of at least 1, got 0",
                "more: expected a table, got integer",
                "lists[1].files: expected a list of strings, got 1"
            ]
        );
        assert_eq!(file.data.batch, 4);
        // A needed key is not missing where another stands for it.
        let mut faults = Faults::default();
        let _: File = read(&"seed = 1\n[data]\nfiles = []".parse().unwrap(), "", &mut faults);
        assert!(faults.is_empty(), "{faults:?}");
    }

    #[test]
    fn files_keep_their_order_and_leave_out_defaults_of_newer_keys() {
        let text = "name = \"a\"\n\n[data]\nfiles = [\"b\"]\nbatch = 4\n";
        let file: File = from_toml(text).unwrap();
        assert_eq!(to_toml(&file), text);
        let text = "name = \"a\"\nseed = 3\n\n[data]\nfiles = []\neps = 0.5\nbatch = 4\nsplit = \"c\"\n\n[more]\nfiles = []\nbatch = 1\n";
        let file: File = from_toml(text).unwrap();
        assert_eq!(to_toml(&file), text);
    }

    #[test]
    fn pages_show_defaults_and_examples() {
        let all = sections(File::default().keys());
        assert_eq!(all.iter().map(|section| section.name).collect::<Vec<_>>(), ["", "data", "more", "lists"]);
        let text = all[1].print(&[("data.batch", "8".to_owned())], &["data.eps"]);
        let lines = [
            "[data]                            # what is read",
            "files = [\"a.txt\"]                 # the texts",
            "batch = 8                         # size of a batch",
            "# split = \"|\"                     # separator",
            "# eps = 1e-8                      # newer than the others",
        ];
        assert_eq!(text.lines().collect::<Vec<_>>(), lines);
        assert!(all[0].print(&[], &[]).starts_with("name = \"run\" "));
    }
}
