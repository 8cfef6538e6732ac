//! `mantissa run --chat`: chat templates, including malicious ones.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::{fail, json as run_json, root, sampled, succeed, text};

/// Makes a tiny model with this chat template.
pub fn model(dir: &Path, template: &Value) -> String {
    let from = root().join("tests/data/tiny/llama2-gqa-tied");
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(from.join(name), dir.join(name)).unwrap();
    }
    let mut config: Value =
        serde_json::from_slice(&fs::read(from.join("tokenizer_config.json")).unwrap()).unwrap();
    config["chat_template"] = template.clone();
    fs::write(dir.join("tokenizer_config.json"), config.to_string()).unwrap();
    text(dir).to_owned()
}

const TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}{{ eos_token if m.role == 'assistant' }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}";

#[test]
fn a_conversation_is_rendered_encoded_and_continued() {
    let temp = tempfile::tempdir().unwrap();
    let folder = model(temp.path(), &json!(TEMPLATE));
    let chat =
        ["run", &folder, "--chat", "-n", "4", "--json", "--quiet", "-p", " Hi ", "--system", "Be kind."];
    let report = run_json(&chat);
    let rendered = "<s>[system] Be kind.\n[user] Hi\n[assistant]";
    assert_eq!(report["rendered"], rendered);
    // The template's <s> becomes the token once; no other BOS is added.
    let plain = run_json(&["run", &folder, "-n", "4", "--json", "--quiet", "-p", rendered, "--bos", "never"]);
    assert_eq!((&report["tokens"], &report["prompt_tokens"]), (&plain["tokens"], &plain["prompt_tokens"]));
    assert!(plain.get("rendered").is_none());
    assert!(!succeed(&["run", &folder, "--chat", "-n", "4", "-p", "Hi", "--quiet"]).is_empty());

    // The same template in its own file, which takes precedence; of several, the default is used.
    fs::write(temp.path().join("chat_template.jinja"), "{{ messages[0].content }}!").unwrap();
    assert_eq!(run_json(&chat)["rendered"], "Be kind.!");
    fs::remove_file(temp.path().join("chat_template.jinja")).unwrap();
    let named = json!([{"name": "tool_use", "template": "x"}, {"name": "default", "template": "{{ messages|length }}"}]);
    model(temp.path(), &named);
    assert_eq!(run_json(&chat)["rendered"], "2");
}

#[test]
fn a_gguf_file_brings_its_template() {
    let temp = tempfile::tempdir().unwrap();
    let (folder, out) = (temp.path().join("m"), temp.path().join("m.gguf"));
    fs::create_dir(&folder).unwrap();
    let folder = model(&folder, &json!(TEMPLATE));
    succeed(&[
        "quantize",
        &folder,
        "--recipe",
        "rtn-f32",
        "--format",
        "gguf",
        "--out",
        text(&out),
        "--quiet",
    ]);
    let report = run_json(&["run", text(&out), "--chat", "-n", "2", "--json", "--quiet", "-p", "Hi"]);
    assert_eq!(report["rendered"], "<s>[user] Hi\n[assistant]");
}

#[test]
fn invalid_or_refusing_templates_fail_in_one_line() {
    let temp = tempfile::tempdir().unwrap();
    let says = |template: Value, says: &str| {
        let folder = model(temp.path(), &template);
        let line = fail(2, &["run", &folder, "--chat", "-n", "1", "-p", "Hi", "--quiet"]);
        assert!(line.contains(&folder) && line.contains(says), "{says}: {line}");
    };
    says(Value::Null, "got no chat template");
    says(json!([{"name": "rag", "template": "x"}]), "chat templates named rag");
    says(json!(7), "chat_template");
    says(json!("{{ raise_exception('only\nassistants') }}"), "got: only assistants");
    says(json!("{% if %}"), "line 1");
    says(json!("\n\n{{ messages.nope.nope }}"), "line 3");
    says(json!("{% include '/etc/passwd' %}"), "chat_template: line 1");
    says(json!("{{ ''.__class__.__mro__ }}"), "chat_template: line 1");
    let folder = model(temp.path(), &json!("x"));
    let line = fail(2, &["run", &folder, "--chat", "--bos", "always", "-p", "x"]);
    assert!(line.contains("--bos"), "{line}");
    assert!(fail(2, &["run", &folder, "--system", "s", "-p", "x"]).contains("--chat"));
    // The hidden command behind it accepts only requests.
    assert!(fail(2, &["render-chat"]).contains("standard input"));
}

/// Strings that are built but never printed: the engine does not count them, the process limits do.
#[test]
fn bombs_of_memory_and_time_end_with_an_error() {
    let temp = tempfile::tempdir().unwrap();
    let doubled = "{% set ns = namespace(x='0123456789abcdef') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x|length }}";
    let set = format!("{{% set x = 'x' %}}{}{{{{ x|length }}}}", "{% set x = x ~ x %}".repeat(60));
    let replaced = "{% set x = 'a' * 100000 %}{{ x|replace('a', x)|replace('a', x)|length }}";
    let joined = "{% set x = 'a' * 100000000 %}{{ [x, x, x, x, x, x, x, x, x, x]|join|length }}";
    let captured = "{% set ns = namespace(x='aaaaaaaaaaaaaaaa') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}";
    let nested = "{% set ns = namespace(x=[]) %}{% for i in range(90000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}";
    // One nesting level per step: the stack ends before the steps do.
    let lists = format!(
        "{{% set ns = namespace(x=[]) %}}{{% for i in range(1500) %}}{{% set ns.x = {}ns.x{} %}}{{% endfor %}}{{{{ ns.x }}}}",
        "[".repeat(100),
        "]".repeat(100)
    );
    let elifs = format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(1000)).repeat(10);
    let bombs = [
        doubled,
        &set,
        replaced,
        joined,
        captured,
        nested,
        &lists,
        &elifs,
        "{{ '%1000000000s' % 'x' }}",
        "{{ '{:1000000000}'.format('x') }}",
        "{{ '%1000000000s'|format('x') }}",
        "{{ 'x\ny'|indent(1000000000) }}",
        "{{ range(1000000000)|list }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages|tojson(indent=1000000000) }}",
        "{{ ('a' * 100000000)|upper|lower|title|capitalize|trim|replace('A', 'aaaaaaaaaaaaaaaaaa')|length }}",
        "{{ 'a'|center(1000000000) }}",
        "{{ [1]|batch(1000000000, 'x')|list|length }}",
        "{{ [1]|slice(1000000000)|list|length }}",
        "{{ ('x' * 100000000).split('')|length }}",
    ];
    for bomb in sampled(bombs, 2) {
        let folder = model(temp.path(), &json!(bomb));
        let started = Instant::now();
        let output = crate::support::mantissa(&["run", &folder, "--chat", "-n", "1", "-p", "Hi", "--quiet"]);
        let said = crate::support::stderr(&output);
        let shown: String = bomb.chars().take(80).collect();
        assert!(started.elapsed() < Duration::from_secs(30), "{shown}: {:?}", started.elapsed());
        match output.status.code() {
            // Templates that the engine or the sizes make harmless.
            Some(0) => {}
            Some(2) => {
                assert!(
                    said.starts_with("error: ") && said.trim_end().lines().count() == 1,
                    "{shown}: {said}"
                );
                assert!(said.contains("chat_template: ") || said.contains("context"), "{shown}: {said}");
            }
            code => panic!("{shown}: {code:?} {said}"),
        }
        println!("{shown}: {:?} {:.0?} {said}", output.status.code(), started.elapsed());
    }
    // Templates that only the process limits stop.
    for bomb in [doubled, &set, captured, joined] {
        let folder = model(temp.path(), &json!(bomb));
        let line = fail(2, &["run", &folder, "--chat", "-n", "1", "-p", "Hi", "--quiet"]);
        assert!(line.contains("2 s of processor time") && line.contains("of memory"), "{line}");
    }
}
