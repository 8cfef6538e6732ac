//! Chat templates by the names that llama.cpp has for them, for models whose files have none or a wrong one. Written from
//! the formats; `tests/interop/chat_template_names.py` compares their texts with llama.cpp's.

/// Names and templates, sorted.
pub(super) const NAMED: &[(&str, &str)] = &[
    ("chatml", include_str!("templates/chatml.jinja")),
    ("command-r", include_str!("templates/command-r.jinja")),
    ("falcon3", include_str!("templates/falcon3.jinja")),
    ("gemma", include_str!("templates/gemma.jinja")),
    ("granite", include_str!("templates/granite.jinja")),
    ("llama2", include_str!("templates/llama2.jinja")),
    ("llama3", include_str!("templates/llama3.jinja")),
    ("mistral-v1", include_str!("templates/mistral-v1.jinja")),
    ("mistral-v3", include_str!("templates/mistral-v3.jinja")),
    ("mistral-v3-tekken", include_str!("templates/mistral-v3-tekken.jinja")),
    ("mistral-v7", include_str!("templates/mistral-v7.jinja")),
    ("mistral-v7-tekken", include_str!("templates/mistral-v7-tekken.jinja")),
    ("phi3", include_str!("templates/phi3.jinja")),
    ("phi4", include_str!("templates/phi4.jinja")),
    ("vicuna", include_str!("templates/vicuna.jinja")),
    ("zephyr", include_str!("templates/zephyr.jinja")),
];

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::super::render;
    use super::*;

    /// Renders a conversation with the template of this name.
    fn text(name: &str) -> String {
        let (_, template) = NAMED.iter().find(|(other, _)| *other == name).unwrap();
        let message = |role: &str, content: &str| json!({ "role": role, "content": content });
        let messages = [
            message("system", "Be brief"),
            message("user", "Hello"),
            message("assistant", "Hi there"),
            message("user", "Who are you?"),
        ];
        let context = json!({ "messages": messages, "add_generation_prompt": true, "bos_token": "<s>", "eos_token": "</s>" });
        render(template, &context).unwrap()
    }

    #[test]
    fn conversations_have_the_form_of_the_name() {
        let chatml = "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi there<|im_end|>\n\
                      <|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n";
        assert_eq!(text("chatml"), chatml);
        let llama2 = "<s>[INST] <<SYS>>\nBe brief\n<</SYS>>\n\nHello [/INST] Hi there </s><s>[INST] Who are you? [/INST]";
        assert_eq!(text("llama2"), llama2);
        let v7 = "<s>[SYSTEM_PROMPT] Be brief[/SYSTEM_PROMPT][INST] Hello[/INST] Hi there</s>[INST] Who are you?[/INST]";
        assert_eq!(text("mistral-v7"), v7);
        assert_eq!(
            text("mistral-v1"),
            "<s> [INST] Be brief\n\nHello [/INST] Hi there</s> [INST] Who are you? [/INST]"
        );
        let gemma = "<s><start_of_turn>user\nBe brief\n\nHello<end_of_turn>\n<start_of_turn>model\nHi there<end_of_turn>\n\
                     <start_of_turn>user\nWho are you?<end_of_turn>\n<start_of_turn>model\n";
        assert_eq!(text("gemma"), gemma);
        assert!(text("llama3").ends_with("<|start_header_id|>assistant<|end_header_id|>\n\n"));
        assert!(text("phi3").ends_with("<|user|>\nWho are you?<|end|>\n<|assistant|>\n"));
        assert!(text("zephyr").contains("<|user|>\nHello</s>\n"));
        assert!(text("command-r").contains("<|USER_TOKEN|>Hello<|END_OF_TURN_TOKEN|>"));
    }

    #[test]
    fn every_template_renders_all_turns_in_order() {
        assert!(NAMED.windows(2).all(|two| two[0].0 < two[1].0));
        for (name, _) in NAMED {
            let text = text(name);
            let at = |part: &str| text.find(part).unwrap_or(usize::MAX);
            let places = ["Be brief", "Hello", "Hi there", "Who are you?"].map(at);
            assert!(places.is_sorted() && places[3] < text.len(), "{name}: {text}");
        }
    }
}
