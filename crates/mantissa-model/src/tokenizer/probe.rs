//! Probe texts: two tokenizers that should be one are compared on texts that have shown differences between formats.

use super::{Tokenizer, call};

/// Texts with spaces at both ends and in runs, digits, punctuation, contractions, code, letters of several scripts,
/// composed and decomposed accents, emoji with modifiers, control characters and characters that no vocabulary has.
const TEXTS: [&str; 40] = [
    "",
    " ",
    "  ",
    "   \n",
    "\n\n",
    "\t",
    "Hello world",
    " Hello  world ",
    "hello\nworld\n\n\n",
    "a\r\nb\rc",
    "Hello, World! It's 3.14, isn't it? I'LL we've HE'D",
    "1 12 123 1234 12345 1234567890 3,141,592.65",
    "٣٤٥ १२३ 二〇二六 ½ ²",
    "x=1;\n\tif (a[0] != b->c) {\n        return \"d\\n\";\n    }  // e\n",
    "def f(x):\n    return x**2  # ok\n\n\n    pass",
    "https://example.org/a_b-c?d=e&f=%20#g user@example.org",
    "the quick brown fox jumps over the lazy dog",
    "THE QUICK Brown fOX camelCaseWord snake_case_word SCREAMING_CASE",
    "naïve café résumé über Straße İstanbul ŒUVRE",
    "cafe\u{301} nai\u{308}ve A\u{30a}ngstro\u{308}m",
    "Ελληνικά Русский язык עברית العربية हिन्दी ไทย",
    "你好，世界。今天天气很好！",
    "こんにちは世界、カタカナとひらがな。",
    "안녕하세요 세계",
    "🙂🙃 👍🏽 👩‍👩‍👧 🇩🇪 ☃︎ ❤️",
    "€ £ ¥ ₹ © ® ™ § ¶ † • … – — “quotes” ‘single’ «guillemets»",
    "a\u{a0}b\u{2003}c\u{200b}d\u{feff}e\u{3000}f",
    "\u{1}\u{7f}\u{80}\u{9f}",
    "\u{10ffff}\u{e000}\u{fffd}",
    "ﬁ ﬂ Ⅳ ℌ ① ㎏ ﾊﾝｶｸ ＦＵＬＬ",
    "--- *** ___ ### ``` ~~~ ||| ... !!! ???",
    "({[<>]}) <a href='x'>y</a> &amp; \\frac{1}{2} $x_i^2$",
    "▁ ▁a a▁b Ġ Ċ <0x0A> <0xFF> </w> ##ing",
    "<s> </s> <unk> <pad> <|endoftext|> <|im_start|> [INST] [CLS]",
    "s 's ' s' 'S don' t",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "        eight spaces, then\t\ttabs   \t mixed \n  \n  end   ",
    "Zürich 8000, 12.5 % of 1e-10 kg·m²/s",
    "{\"name\": \"Zoë\", \"n\": [1, -2.5e3, null, true]}",
    "word. Word, word; WORD: word? (word) word/word-word_word",
];

/// Largest number of added tokens that are tried in all positions.
const MAX_ADDED: usize = 512;

/// Text that two tokenizers encode differently.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeDifference {
    /// The text.
    pub text: String,
    /// Ids of both tokenizers.
    pub ids: [Vec<u32>; 2],
}

impl std::fmt::Display for ProbeDifference {
    /// Writes the text, and the tokens of the second tokenizer and the first from the first difference on.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        const SHOWN: usize = 6;
        let [expected, got] = &self.ids;
        let at = expected.iter().zip(got).take_while(|(a, b)| a == b).count();
        let shown = |ids: &[u32]| {
            let some = ids[at..].iter().take(SHOWN).map(u32::to_string).collect::<Vec<_>>().join(", ");
            if ids.len() > at + SHOWN { some + ", …" } else { some }
        };
        let (expected, got) = (shown(expected), shown(got));
        write!(f, "{:?} is [{got}] from token {at} on, expected [{expected}]", self.text)
    }
}

/// Texts on which tokenizers are compared, with the ids of one of them, which need not stay in memory.
#[derive(Clone, Debug)]
pub struct Probes(Vec<(String, Vec<u32>)>);

impl Tokenizer {
    /// Encodes texts that have shown differences between formats, and every added token of this tokenizer alone, inside a
    /// word, and between spaces.
    ///
    /// # Errors
    /// [`TokenizerError`](super::TokenizerError) if the library fails.
    pub fn probes(&self) -> Result<Probes, super::TokenizerError> {
        let mut added: Vec<_> = self.inner.get_added_tokens_decoder().into_iter().collect();
        added.sort_unstable_by_key(|(id, _)| *id);
        let around = |token: &str| {
            [
                token.to_owned(),
                format!("a{token}b"),
                format!("a {token} b"),
                format!("a  {token}  b\n"),
                format!("{token}{token} A"),
            ]
        };
        let tokens = added.iter().take(MAX_ADDED).flat_map(|(_, token)| around(&token.content));
        let texts = TEXTS.iter().map(|text| (*text).to_owned()).chain(tokens);
        let encoded = texts.map(|text| self.probe(&text).map(|ids| (text, ids)));
        Ok(Probes(encoded.collect::<Result<_, _>>()?))
    }

    /// Compares the ids of this tokenizer with those of `probes`. Returns the first difference.
    ///
    /// # Errors
    /// [`TokenizerError`](super::TokenizerError) if the library fails.
    pub fn first_difference_from(
        &self,
        probes: Probes,
    ) -> Result<Option<ProbeDifference>, super::TokenizerError> {
        for (text, expected) in probes.0 {
            let ids = self.probe(&text)?;
            if ids != expected {
                return Ok(Some(ProbeDifference { text, ids: [expected, ids] }));
            }
        }
        Ok(None)
    }

    /// Encodes a text with the tokens that begin and end it.
    fn probe(&self, text: &str) -> Result<Vec<u32>, super::TokenizerError> {
        let encoding = call(&self.path, "encode", || self.inner.encode_fast(text, true))?;
        Ok(encoding.get_ids().to_vec())
    }
}
