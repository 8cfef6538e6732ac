//! Formats in which models write calls of tools, as data.

/// Form of a call between the marks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Body {
    /// `{"name": …, "arguments": {…}}`.
    Object,
    /// The name, this text, and the object of the arguments.
    NameThen(&'static str),
}

/// Format of calls.
#[derive(Debug, PartialEq, Eq)]
pub struct Syntax {
    /// Name of the format.
    pub name: &'static str,
    /// Texts in a chat template that tell the format: all of them, and none of `other`.
    signs: &'static [&'static str],
    other: &'static [&'static str],
    /// Text before a call, or before the list of calls. Without it a reply that begins with a brace is a call.
    pub(super) open: &'static str,
    /// White space after the opening and before the closing text, in forced calls.
    pub(super) inner: &'static str,
    pub(super) body: Body,
    /// Keys of the arguments; the first is the one written.
    pub(super) arguments: &'static [&'static str],
    /// True if the calls are a JSON array.
    pub(super) is_list: bool,
    /// Text after a call.
    pub(super) close: &'static str,
    /// Text between calls that have no opening text.
    pub(super) between: &'static str,
    /// Names of special tokens that belong to the format, so that a reply's text has to contain them.
    pub markers: &'static [&'static str],
}

/// Nous Research's Hermes function calling, also of Qwen 2.5 and Qwen 3.
static HERMES: Syntax = Syntax {
    name: "hermes",
    signs: &["<tool_call>", "</tool_call>"],
    other: &["<function=", "<arg_key>"],
    open: "<tool_call>",
    inner: "\n",
    body: Body::Object,
    arguments: &["arguments", "parameters"],
    is_list: false,
    close: "</tool_call>",
    between: "\n",
    markers: &["<tool_call>", "</tool_call>"],
};

/// Mistral 7B v0.3 to Small 2409: a list after a special token.
static MISTRAL: Syntax = Syntax {
    name: "mistral",
    signs: &["[TOOL_CALLS]"],
    other: &["[ARGS]"],
    open: "[TOOL_CALLS]",
    inner: "",
    body: Body::Object,
    arguments: &["arguments"],
    is_list: true,
    close: "",
    between: "",
    markers: &["[TOOL_CALLS]"],
};

/// Mistral Small 3.1 and later: name and arguments after special tokens.
static MISTRAL_ARGS: Syntax = Syntax {
    name: "mistral-args",
    signs: &["[TOOL_CALLS]", "[ARGS]"],
    other: &[],
    open: "[TOOL_CALLS]",
    inner: "",
    body: Body::NameThen("[ARGS]"),
    arguments: &["arguments"],
    is_list: false,
    close: "",
    between: "",
    markers: &["[TOOL_CALLS]", "[ARGS]"],
};

/// Llama 3.1 to 3.3: the reply is the object of the call.
static LLAMA3: Syntax = Syntax {
    name: "llama3",
    signs: &["<|start_header_id|>", "parameters"],
    other: &["<tool_call>"],
    open: "",
    inner: "",
    body: Body::Object,
    arguments: &["parameters", "arguments"],
    is_list: false,
    close: "",
    between: "; ",
    markers: &[],
};

/// For templates without tools: the reply is the object of the call, as a system message explains.
static GENERIC: Syntax = Syntax {
    name: "json",
    signs: &[],
    other: &[],
    open: "",
    inner: "",
    body: Body::Object,
    arguments: &["arguments", "parameters"],
    is_list: false,
    close: "",
    between: "\n",
    markers: &[],
};

impl Syntax {
    /// Format of a model's calls, by its chat template.
    pub fn of(template: Option<&str>) -> &'static Self {
        let template = template.unwrap_or_default();
        let fits = |syntax: &&&Syntax| {
            syntax.signs.iter().all(|sign| template.contains(sign))
                && !syntax.other.iter().any(|other| template.contains(other))
        };
        [&HERMES, &MISTRAL_ARGS, &MISTRAL, &LLAMA3].iter().find(fits).copied().unwrap_or(&GENERIC)
    }

    /// True if the chat template does not present tools, so that a message has to.
    pub fn needs_message(&self) -> bool {
        self.signs.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_tell_the_format() {
        let name = |template| Syntax::of(Some(template)).name;
        assert_eq!(name("{{ '<tool_call>\\n' + x + '</tool_call>' }}"), "hermes");
        assert_eq!(name("[TOOL_CALLS] [{...}]"), "mistral");
        assert_eq!(name("[TOOL_CALLS]name[ARGS]{}"), "mistral-args");
        assert_eq!(name("<|start_header_id|> ... 'parameters': "), "llama3");
        assert_eq!(name("<tool_call><function=x></tool_call>"), "json");
        assert_eq!(name("<|im_start|>"), "json");
        assert_eq!(Syntax::of(None).name, "json");
    }
}
