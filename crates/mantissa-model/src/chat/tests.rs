use super::*;

fn tokens() -> BTreeMap<String, String> {
    [("bos_token", "<s>"), ("eos_token", "</s>")].map(|(k, v)| (k.to_owned(), v.to_owned())).into()
}

fn conversation() -> Vec<Message> {
    vec![
        Message::new("system", "Be brief."),
        Message::new("user", " Hi <b>&amp; ünï\n"),
        Message::new("assistant", "Ho."),
    ]
}

fn rendered(template: &str) -> Result<String, ChatError> {
    render(template, &context(&conversation(), &tokens()))
}

#[test]
fn the_common_forms_of_templates_render_as_in_jinja() {
    let turns = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
    let expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hi <b>&amp; ünï\n<|im_end|>\n<|im_start|>assistant\nHo.<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(rendered(turns).unwrap(), expected);

    // Block tags on lines of their own, namespaces, slices, methods, tests, loop variables, macros, loop controls.
    let long = "
{%- macro show(text) %}[{{ text | trim }}]{% endmacro -%}
{{- bos_token -}}
{% if messages[0].role == 'system' %}
    {% set system = messages[0].content %}
    {% set rest = messages[1:] %}
{% endif %}
{% set ns = namespace(seen=0) %}
{% for m in rest %}
    {% if m.role not in ['user', 'assistant'] %}{% continue %}{% endif %}
    {% set ns.seen = ns.seen + 1 %}
    {% if loop.first and system is defined and system is string %}
<<SYS>>{{ system }}<</SYS>>
    {% endif %}
{{ show(m.content.strip()) }}{{ m.content.split('.')[0] | length }}{{ eos_token if loop.last else '' }}
{% endfor %}
{{ ns.seen }} {{ tools is none }} {{ missing is defined }} {{ none }} {{ 'ab'.startswith('a') }} {{ 7 // 2 }}";
    let expected = "<s><<SYS>>Be brief.<</SYS>>\n[Hi <b>&amp; ünï]17\n[Ho.]2</s>\n2 True False None True 3";
    assert_eq!(rendered(long).unwrap(), expected);
}

/// A model has several templates in a folder of files, a list or keys of a GGUF file; conversations with tools have their own.
#[test]
fn named_templates_are_read_and_written() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("chat_template.jinja"), "plain").unwrap();
    std::fs::create_dir(dir.path().join(ChatTemplates::FOLDER)).unwrap();
    std::fs::write(dir.path().join(ChatTemplates::FOLDER).join("tool_use.jinja"), "tools").unwrap();
    std::fs::write(dir.path().join(ChatTemplates::FOLDER).join("notes.txt"), "none").unwrap();
    let folder = ChatTemplates::load(dir.path(), None).unwrap();
    let list = json!({"chat_template": [
        {"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}
    ]});
    let listed = ChatTemplates::load(tempfile::tempdir().unwrap().path(), Some(&list)).unwrap();
    let keys = Metadata::from_pairs(Path::new("m.gguf"), folder.to_metadata());
    for templates in [&folder, &listed, &ChatTemplates::of_metadata(&keys).unwrap()] {
        assert_eq!(templates.names().collect::<Vec<_>>(), ["default", "tool_use"]);
        assert_eq!((templates.get("default"), templates.get("tool_use")), (Some("plain"), Some("tools")));
    }
    let names = keys.get("tokenizer.chat_templates").and_then(GgufValue::as_array).unwrap();
    assert_eq!(names.iter().filter_map(GgufValue::as_str).collect::<Vec<_>>(), ["tool_use"]);
}

#[test]
fn json_matches_python() {
    let template = r#"{{ {"b": [1, 2.5, none, true], "a": {"ü": "<&>\"\n", "e": [], "o": {}}} | tojson }}"#;
    let expected = r#"{"b": [1, 2.5, null, true], "a": {"ü": "<&>\"\n", "e": [], "o": {}}}"#;
    assert_eq!(rendered(template).unwrap(), expected);
    let indented =
        rendered(r#"{{ {"b": [1, {"x": 2}], "a": 3} | tojson(indent=2, sort_keys=true) }}"#).unwrap();
    assert_eq!(indented, "{\n  \"a\": 3,\n  \"b\": [\n    1,\n    {\n      \"x\": 2\n    }\n  ]\n}");
    assert!(rendered("{{ messages | tojson(indent=1000000000) }}").is_err());
}

#[test]
fn a_template_can_refuse_and_ask_for_the_date() {
    let refusal = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('No system role\nhere') }}{% endif %}{% endfor %}";
    assert_eq!(rendered(refusal), Err(ChatError::Refused("No system role here".into())));
    let date = rendered("{{ strftime_now('%d %b %Y') }}").unwrap();
    assert!(date.len() == 11 && date.as_bytes()[2] == b' ', "{date}");
    assert_eq!(rendered("a{% generation %}b{%- endgeneration -%} c").unwrap(), "abc");
}

#[test]
fn no_host_object_is_reachable() {
    for probe in [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['os'].system('id') }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import '/etc/passwd' as x %}",
        "{% from '/etc/passwd' import x %}",
        "{% extends '/etc/passwd' %}",
        "{{ open('/etc/passwd').read() }}",
        "{{ lipsum.__globals__ }}",
        "{{ request.application }}",
        "{{ config.items() }}",
        "{{ ''|attr('__class__')|attr('__mro__') }}",
        "{{ get_flashed_messages.__globals__ }}",
        "{{ 'x'.format.__globals__ }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    ] {
        if let Ok(text) = rendered(probe) {
            assert!(text.is_empty() || text == "None", "{probe}: {text}");
        }
    }
}

/// Steps, output and depth are bounded. Strings that are built and not printed are bounded by the process that the
/// binary renders in, whose tests check that.
#[test]
fn bombs_end_in_an_error() {
    let limit = |template: &str, says: &str| {
        let started = std::time::Instant::now();
        let error = rendered(template).unwrap_err().to_string();
        assert!(error.contains(says), "{says}: {error}");
        assert!(started.elapsed() < std::time::Duration::from_secs(30), "{:?}", started.elapsed());
    };
    let loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{{ c }}{% endfor %}{% endfor %}{% endfor %}";
    limit(loops, "steps");
    limit("{% for a in range(1000000000) %}{% endfor %}", "range has too many elements");
    limit("{% for a in range(1000) %}{{ 'x' * 100000 }}{% endfor %}", "bytes");
    limit("{{ '%1000000000s' % 'x' }}", "line 1");
    limit("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion");
    let deep = |open: &str, close: &str, n: usize| open.repeat(n) + &close.repeat(n);
    limit(&deep("{% if a %}", "{% endif %}", 10_000), "blocks nested deeper");
    limit(&deep("{% if a %}", "{% endif %}", 100_000), "bytes");
    limit(&format!("{{{{ {} }}}}", deep("(", ")", 4000)), "brackets nested deeper");
    limit(&format!("{{{{ {}a }}}}", "not ".repeat(3000)), "bytes");
    limit(&format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(1001)), "elif");
    // As deep as the limits let a tree become.
    for chain in ["a|trim", "a.b", "~a", "+a", "[0]", "(a)", " and a", " if a else a", "==a", "-a"] {
        let (first, again) = chain.split_at(chain.len().min(1));
        let chain = first.to_owned() + &again.repeat((8000 - 1) / again.len().max(1));
        let _ = rendered(&format!("{{{{ {chain} }}}}"));
        let _ = rendered(&format!("{{{{ a{} }}}}", chain));
        let _ = rendered(&format!("{{{{ {}a }}}}", "- ".repeat(4000)));
        let _ = rendered(&format!("{{{{ {}a }}}}", "not ".repeat(2000)));
    }
    let _ = rendered(&format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(1000)));
    // A value nested by a few thousand steps, which is printed, compared and dropped.
    let nested =
        "{% set ns = namespace(x=[]) %}{% for i in range(9000) %}{% set ns.x = [ns.x] %}{% endfor %}";
    assert!(rendered(nested).is_ok());
    for use_of in ["{{ ns.x }}", "{{ ns.x|tojson }}", "{{ ns.x == ns.x }}"] {
        let _ = rendered(&format!("{nested}{use_of}"));
    }
}

/// Parts repeated a hundred thousand times, as far as a template may be long: each ends in a text or in a message that
/// says what is too much, never in a panic of the engine.
#[test]
fn repeated_parts_are_refused_or_rendered() {
    let fill = |part: &str| part.repeat(100_000.min((MAX_TEMPLATE - 200) / part.len()));
    let tag = |part: &str| format!("{{{{ a{} }}}}", fill(part));
    let mut all: Vec<String> = vec!["{#".repeat(50_000), "{#\n".repeat(50_000), "{#-".repeat(50_000)];
    for part in [
        "{#",
        "{{",
        "{%",
        "{% if",
        "{% if a %}",
        "{% for",
        "{% for a in b %}",
        "{% macro f() %}",
        "{% raw %}",
        "{% set a %}",
        "{% else %}",
        "{% endif %}",
        "{% call f() %}",
        "{% filter upper %}",
        "{% with %}",
        "{% block b %}",
        "{% generation %}",
        "{{ '",
        "{{ \"",
        "{{ (",
        "{{ [",
        "{{ {",
        "{{ )",
        "#}",
        "%}",
        "}}",
        "{# #}",
        "{{ a }}",
        "{{}}",
        "{%%}",
        "{% %}",
        "{%- raw -%}",
        "{% endraw %}",
        "{#}",
        "{{'}}'",
        "\n",
        "\r",
        "ü",
        "{",
        "{ {",
        "\u{2028}",
        "{% break %}",
    ] {
        all.extend([fill(part), fill(&format!("{part}\n")), format!("{}{{{{ a }}}}", fill(part))]);
        // As many as fit in a line.
        let line = part.repeat(60_000 / part.len());
        all.extend([format!("{line}{{{{ a }}}}"), line]);
    }
    for part in [
        "|upper",
        ".a",
        "[0]",
        "~a",
        "+a",
        " and a",
        " or not a",
        "==a",
        " if a else a",
        "|upper|lower",
        "(a)",
        " is defined",
        "|tojson(1)",
        "**a",
        " in a",
        "[1:2]",
        ", a",
        "\n~\na",
        "~'}}'",
        "~{}",
        "~\"%}\"",
    ] {
        all.push(tag(part));
        // The end of the tag is hidden in a string, in brackets, in a raw block and in a comment.
        all.push(format!("{{{{ '}}}}' ~ a{} }}}}", fill(part)));
        all.push(format!("{{{{ {{'a': {{}}}} ~ a{} }}}}", fill(part)));
        all.push(format!("{{% raw %}}{{#{{% endraw %}}{}#}}", tag(part)));
        all.push(format!("{{% raw %}}{{{{ \"{{% endraw %}}{}\" }}}}", tag(part)));
        all.push(format!("{{# {{% raw %}} #}}{}", tag(part)));
        all.push(format!("{{{{ '\\'}}}}' ~ a{} }}}}", fill(part)));
    }
    for part in
        ["(", "[", "{", "not ", "-", "- ", "{'a':", "a if ", "f(", "a[", "lambda ", "'' ~ (", "[a for "]
    {
        all.push(format!("{{{{ {}a }}}}", fill(part)));
        all.push(format!("{{% set b = {}a %}}", fill(part)));
        all.push(format!("{{% if {}a %}}{{% endif %}}", fill(part)));
    }
    all.push(format!("{{{{ '{}' }}}}", "x".repeat(MAX_TEMPLATE - 100)));
    all.push(format!("{{{{ '{}' }}}}", "\\u0041".repeat(40_000)));
    all.push("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}".to_owned());
    all.push(
        "{% macro f(n) %}{{ g(n) }}{% endmacro %}{% macro g(n) %}{{ f(n) }}{% endmacro %}{{ f(0) }}"
            .to_owned(),
    );
    all.push("{% macro f() %}{{ caller() }}{% endmacro %}{% call f() %}{{ f() }}{% endcall %}".to_owned());
    all.push("{% for a in [[[]]] recursive %}{{ loop([[a]]) }}{% endfor %}".to_owned());
    for template in &all {
        let started = std::time::Instant::now();
        if let Err(error) = rendered(template) {
            let error = error.to_string();
            let shown: String = template.chars().take(60).collect();
            assert!(!error.contains("panic") && error.len() < 2000, "{shown}: {error}");
            assert!(!error.contains(char::is_control), "{shown}: {error}");
        }
        assert!(started.elapsed() < std::time::Duration::from_secs(20), "{:?}", started.elapsed());
    }
    let says = |template: String, says: &str| {
        let error = rendered(&template).unwrap_err().to_string();
        assert!(error.contains(says), "{says}: {error}");
    };
    says("{#".repeat(50_000), "a line of 100000 characters");
    says("\n".repeat(100_000), "a template of 100001 lines");
    says("{{ a }}\n".repeat(10_001), "a template of more tags");
    says(tag("|upper").replace("upper", "lower"), "tags of up to 8192 bytes");
    says(format!("{{{{ '}}}}' ~ a{} }}}}", fill("~a")), "tags of up to 8192 bytes");
    says(format!("{{{{ {{'a': {{}}}} ~ a{} }}}}", fill("~a")), "tags of up to 8192 bytes");
    says(format!("{{% raw %}}{{#{{% endraw %}}{}#}}", tag("~a")), "tags of up to 8192 bytes");
}

/// Text of strings, brackets and raw blocks holds no tags, for the engine and for the limits.
#[test]
fn strings_brackets_and_raw_blocks_are_read_as_the_engine_reads_them() {
    for (template, text) in [
        ("{{ '}}' }}{{ \"%}\" }}", "}}%}"),
        ("{{ {'a': {'b': 1}}.a.b }}", "1"),
        ("{% raw %}{{ ' {# {% if %}{% endraw %}x", "{{ ' {# {% if %}x"),
        ("{%- raw -%} {{ a }} {%- endraw -%} x", "{{ a }}x"),
        ("{{ 'it\\'s }}' }}", "it's }}"),
        ("{# {{ ' #}x", "x"),
        ("{% generation %}a{% endgeneration %}", "a"),
        ("{% set a = '%}' %}{{ a }}", "%}"),
    ] {
        assert_eq!(rendered(template).as_deref(), Ok(text), "{template}");
    }
}

#[test]
fn templates_are_found_where_models_keep_them() {
    let dir = tempfile::tempdir().unwrap();
    let load = |config: Value| ChatTemplates::load(dir.path(), Some(&config));
    assert_eq!(load(json!({})).unwrap(), ChatTemplates::default());
    assert_eq!(load(json!({"chat_template": "a"})).unwrap().get("default"), Some("a"));
    let list = json!({"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]});
    let both = load(list).unwrap();
    assert_eq!((both.get("default"), both.get("tool_use"), both.names().count()), (Some("a"), Some("b"), 2));
    for bad in [json!({"chat_template": 7}), json!({"chat_template": [{"name": "default"}]})] {
        let error = load(bad).unwrap_err().to_string();
        assert!(error.contains("tokenizer_config.json: chat_template: expected"), "{error}");
    }
    let own = dir.path().join("chat_template.jinja");
    std::fs::write(&own, "of its own").unwrap();
    assert_eq!(load(json!({"chat_template": "a"})).unwrap().get("default"), Some("of its own"));
    std::fs::write(&own, [b'a', 0xff]).unwrap();
    assert!(load(json!({})).unwrap_err().to_string().contains("invalid UTF-8 at byte 1"));
    std::fs::write(&own, vec![b'a'; MAX_TEMPLATE + 1]).unwrap();
    assert!(load(json!({})).unwrap_err().to_string().contains("at most 262144 bytes"));
}

/// Texts of Jinja 3 as transformers sets it up: `tests/interop/templates.py` writes them.
#[test]
fn templates_render_as_in_jinja() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/chat_templates.json");
    let data: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let rows = data["rows"].as_array().unwrap();
    assert!(rows.len() > 600);
    let mut wrong = Vec::new();
    for row in rows {
        let (template, expected) = (row["template"].as_str().unwrap(), row["text"].as_str());
        let got = render(template, &data["context"]);
        match (&got, expected) {
            (Ok(text), Some(expected)) if text == expected => {}
            (Err(_), None) => {}
            (Err(_), Some(_)) if row["refused"] == true => {}
            _ => wrong.push(format!("{template}\n  expected {expected:?}\n  got {got:?}")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Forms that the engine has otherwise: rendered as Jinja 3.1.6 does, or refused.
#[test]
fn other_forms_render_as_in_jinja_or_are_refused() {
    for (template, expected) in [
        (r"{{ 'a\U0001F642b' }}", "a🙂b"),
        (r"{{ '\a\v\/<\/think>' }}", "\u{7}\u{b}\\/<\\/think>"),
        ("{{ 'a\\\nb' }}", "ab"),
        (r#"{{ 'it\'s' ~ "\\" }}"#, "it's\\"),
        ("{% raw %}\n{{ x }}\n{% endraw %}\ny", "\n{{ x }}\ny"),
        ("{% raw -%}\n{{ x }}{% endraw %}", "{{ x }}"),
        ("{{ \"they're iPhone a.b x2y\".title() }}", "They'Re Iphone A.B X2Y"),
        ("{{ '--5'.zfill(6) }}|{{ '-5'.zfill(4) }}|{{ '5'.zfill(3) }}", "-000-5|-005|005"),
        (
            "{{ 'abc'.startswith('', 5) }}{{ 'abc'.startswith('', 3) }}{{ 'abc'.endswith('', 4) }}",
            "FalseTrueFalse",
        ),
        ("{{ [1, 2, 3][::-1] }}{{ [1, 2, 3][2::-1] }}{{ [1, 2, 3][:1:-1] }}", "[3, 2, 1][3, 2, 1][3]"),
        ("{% macro f(x, y='x') %}{{ y }}{% endmacro %}{{ f(1) }}", "x"),
        ("{% with a = 1 %}{% with b = a %}{{ b }}{% endwith %}{% endwith %}", "1"),
        ("{{ '%(a)s' % {'a': none} }}", "None"),
    ] {
        assert_eq!(rendered(template).as_deref(), Ok(expected), "{template}");
    }
    for (template, found) in [
        ("\n{{ [1, 2, 3][2:0:-1] }}", "a slice [2:0:-1]"),
        ("{{ [1, 2, 3][:-3:-1] }}", "a slice [:-3:-1]"),
        ("{% for m in messages[3:tools:-1] %}{% endfor %}", "a slice [3:tools:-1]"),
        ("{% macro f(x, y=x) %}{{ y }}{% endmacro %}{{ f(1) }}", "macro: x"),
        ("{% with a = 1, b = a + 1 %}{{ b }}{% endwith %}", "with: a"),
        (r"{{ '\N{BULLET}' }}", "write the character itself"),
        (r"{{ '\U00110000' }}", "eight digits"),
        ("{{ 'x'.ljust(3, 'ab') }}", "one character"),
        ("{{ '%(x)s' % {'a': 1} }}", "the key x"),
    ] {
        let error = rendered(template).unwrap_err().to_string();
        assert!(error.contains(found), "{template}: {error}");
        assert_eq!(error.contains("line 2"), template.starts_with('\n'), "{error}");
    }
}

#[test]
fn operators_of_strings_keep_their_place() {
    let cases = [
        ("{{ 'a' ~ '%s' % 'b' ~ 'c' }}", "abc"),
        ("{{ '%s' % ('%s' % 'x') }}{{ 7 % 4 }}", "x3"),
        ("{# '%s' % #}{% raw %}{{ '%s' % 1 }}{% endraw %}", "{{ '%s' % 1 }}"),
        ("{% set x = '%s' % 'y' -%} {{ x }}%{{ '%' }}", "y%%"),
        ("{{ 'it\\'s %s' % \"q\" }}", "it's q"),
    ];
    for (template, expected) in cases {
        assert_eq!(rendered(template).unwrap(), expected, "{template}");
    }
    for unfinished in ["{{ '%s' % }}", "{{ '%s' % ( }}", "{{ '%s", "{{ '%' % 'ü"] {
        assert!(rendered(unfinished).is_err(), "{unfinished}");
    }
}
