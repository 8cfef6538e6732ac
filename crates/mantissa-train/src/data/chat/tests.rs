use std::path::{Path, PathBuf};

use mantissa_model::chat;
use serde_json::{Value, json};

use super::*;
use crate::data::{Cursor, Data, Sample, train_bpe};

const CHATML: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";
const LLAMA2: &str = "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}";
const GEMMA: &str = "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>model\\n' }}{% endif %}";
/// Drops the reasoning of all turns but the last.
const REASONING: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// A tokenizer with the tokens of ChatML.
fn tokenizer(dir: &Path) -> Tokenizer {
    let documents = ["the quick fox asks and the slow dog answers, hello user assistant ".repeat(30)];
    let trained = train_bpe(&documents, 300).unwrap();
    let mut file: Value = serde_json::from_str(&trained.tokenizer).unwrap();
    for (i, name) in ["<|im_start|>", "<|im_end|>"].into_iter().enumerate() {
        file["added_tokens"].as_array_mut().unwrap().push(json!({
            "id": 300 + i, "content": name, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true
        }));
    }
    std::fs::write(dir.join("tokenizer.json"), file.to_string()).unwrap();
    std::fs::write(dir.join("tokenizer_config.json"), trained.config).unwrap();
    Tokenizer::load(dir).unwrap()
}

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../mantissa-jobs/demo/model")
}

fn read_with(
    tokenizer: &Tokenizer,
    template: Option<&str>,
    lines: &str,
    length: usize,
) -> Result<Conversations, DataError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("chat.jsonl");
    std::fs::write(&path, lines).unwrap();
    let mut render = |contexts: &[Value]| {
        let template = template.unwrap();
        Ok(contexts.iter().map(|c| chat::render(template, c).map_err(|e| e.to_string())).collect())
    };
    let render: Option<&mut Render<'_>> = if template.is_some() { Some(&mut render) } else { None };
    let read = Conversations::read(&path, tokenizer, length, 1 << 30, render)?;
    read.require_lines("chat.jsonl", length).map(|()| read)
}

fn read(template: Option<&str>, lines: &str, length: usize) -> Result<Conversations, DataError> {
    let dir = tempfile::tempdir().unwrap();
    read_with(&tokenizer(dir.path()), template, lines, length)
}

/// Text of all tokens of a line, and those that the loss counts, joined by `|` where others lie between.
fn shown(tokenizer: &Tokenizer, lines: &Conversations, index: usize) -> (String, String) {
    let (tokens, targets) = lines.line(index);
    let all = tokenizer.decode_with_special(tokens).unwrap();
    let runs = targets.split(|target| *target == IGNORE_TARGET).filter(|run| !run.is_empty());
    let runs: Vec<_> = runs.map(|run| tokenizer.decode_with_special(run).unwrap()).collect();
    (all, runs.join("|"))
}

fn messages(turns: &[(&str, &str)]) -> String {
    let turns: Vec<_> =
        turns.iter().map(|(role, content)| json!({"role": role, "content": content})).collect();
    json!({"messages": turns}).to_string()
}

#[test]
fn the_loss_counts_answers_and_the_end_of_their_turn() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer(dir.path());
    let line = messages(&[
        ("system", "the rules"),
        ("user", "hello dog"),
        ("assistant", "hello fox"),
        ("user", "quick?"),
        ("assistant", " slow "),
    ]);
    for (template, counted) in [
        (CHATML, "hello fox<|im_end|>| slow <|im_end|>"),
        (GEMMA, "hello fox<|im_end|>|slow<|im_end|>"),
        (LLAMA2, " hello fox <|end|>|  slow  <|end|>"),
    ] {
        let read = read_with(&tokenizer, Some(template), &line, 500).unwrap();
        let (all, found) = shown(&tokenizer, &read, 0);
        assert_eq!(found, counted, "{all}");
        // The last target is not an input.
        assert!(all.contains("hello dog") && !all.ends_with("<|im_end|>"), "{all}");
        assert_eq!(read.counts.lines, 1);
    }
}

/// The template of the demo model joins the texts; its answers begin with the space between and end with the text.
#[test]
fn the_demo_model_learns_answers_and_where_they_end() {
    let tokenizer = Tokenizer::load(&demo()).unwrap();
    let line = messages(&[("user", "Once upon a time"), ("assistant", "there was a fox.")]);
    let read = read_with(&tokenizer, tokenizer.chat_template(), &line, 500).unwrap();
    let (all, found) = shown(&tokenizer, &read, 0);
    let end = &tokenizer.special_tokens()["eos_token"];
    assert_eq!(found, format!(" there was a fox.{end}"));
    assert!(all.ends_with("Once upon a time there was a fox."), "{all}");
}

#[test]
fn prompts_texts_and_weights_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer(dir.path());
    let lines = [
        json!({"prompt": "the quick fox", "completion": " asks", "id": 7}).to_string(),
        json!({"text": "the slow dog"}).to_string(),
        String::new(),
        json!({"messages": [
            {"role": "user", "content": "a"}, {"role": "assistant", "content": "dog", "weight": 0},
            {"role": "user", "content": "b"}, {"role": "assistant", "content": "fox", "weight": 1}
        ]})
        .to_string(),
        json!({
            "prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "dog"}, {"role": "user", "content": "b"}],
            "completion": [{"role": "assistant", "content": "fox"}]
        })
        .to_string(),
    ];
    let read = read_with(&tokenizer, Some(CHATML), &lines.join("\r\n"), 500).unwrap();
    let found: Vec<_> = (0..read.len()).map(|i| shown(&tokenizer, &read, i).1).collect();
    assert_eq!(found, [" asks<|end|>", "the slow dog<|end|>", "fox<|im_end|>", "fox<|im_end|>"]);
    assert_eq!(read.line(2), read.line(3));
    // The beginning-of-text token is there, as in a prompt of `run`.
    assert_eq!(read.line(0).0[0], tokenizer.bos().unwrap());
}

#[test]
fn a_template_that_changes_earlier_turns_is_refused_with_the_line() {
    let good = messages(&[("user", "a"), ("assistant", "<think>b</think>c")]);
    assert!(read(Some(REASONING), &good, 500).is_ok());
    let changed = messages(&[
        ("user", "a"),
        ("assistant", "<think>b</think>c"),
        ("user", "d"),
        ("assistant", "<think>e</think>f"),
    ]);
    let error = read(Some(REASONING), &format!("{good}\n\n{changed}"), 500).unwrap_err().to_string();
    assert!(
        error.contains("chat.jsonl: line 3: messages[1]: expected a chat template that only appends"),
        "{error}"
    );
    assert!(error.contains("message 2") && error.contains("fix: "), "{error}");
    // As the message says.
    let answer = "\"<think>b</think>c\"";
    let last = changed.replace(answer, &format!("{answer},\"weight\":0"));
    assert_ne!(last, changed);
    assert!(read(Some(REASONING), &last, 500).is_ok());
}

#[test]
fn lines_of_other_forms_are_refused_with_file_and_line() {
    let good = messages(&[("user", "a"), ("assistant", "b")]);
    for (line, expected) in [
        ("{", "EOF"),
        ("[1]", "got a list"),
        ("{}", "got no field"),
        (r#"{"question": "a", "answer": "b"}"#, "got none of these fields, but \"question\", \"answer\""),
        (r#"{"messages": 3}"#, "messages: expected a list of messages, got a number"),
        (r#"{"messages": [{"role": "user"}]}"#, "messages[0].content: expected a text, got no such field"),
        (
            r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]}"#,
            r#"messages[1].content: expected a text, got no such field; fix: write it as {"role": "assistant", "content": "…"}"#,
        ),
        (
            r#"{"conversations": [{"from": "gpt", "value": 1}]}"#,
            r#"conversations[0].value: expected a text, got a number; fix: write it as {"from": "gpt", "value": "…"}"#,
        ),
        (
            r#"{"question": "a", "answer": "b"}"#,
            r#"fix: rename "question" to "prompt" and "answer" to "completion""#,
        ),
        (r#"{"instruction": "a", "response": "b"}"#, r#"fix: rename "response" to "output""#),
        (r#"{"prompt": "a", "response": "b"}"#, r#"fix: rename "response" to "completion""#),
        (
            r#"{"messages": [{"role": "user", "content": null}]}"#,
            "messages[0].content: expected a text, got null",
        ),
        (r#"{"messages": ["a"]}"#, "messages[0]: expected a message of a role and a text, got a text"),
        (r#"{"messages": [{"content": "a"}]}"#, "messages[0].role: expected a text, got no such field"),
        (
            r#"{"messages": [{"role": "user", "content": [{"type": "image"}]}]}"#,
            "messages[0].content[0]: expected parts",
        ),
        (
            r#"{"conversations": [{"from": "robot", "value": "a"}]}"#,
            "conversations[0].from: expected human, gpt",
        ),
        (
            r#"{"conversations": [{"from": "human"}]}"#,
            "conversations[0].value: expected a text, got no such field",
        ),
        (r#"{"instruction": "a"}"#, "output: expected a text, got no such field"),
        (r#"{"instruction": "a", "output": ["b"]}"#, "output: expected a text, got a list"),
        (r#"{"instruction": "a", "input": 1, "output": "b"}"#, "input: expected a text, got a number"),
        (r#"{"text": 3}"#, "text: expected a text, got a number"),
        (
            r#"{"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]}"#,
            "messages[0].tool_calls: expected a message without calls of tools",
        ),
        (
            r#"{"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}"#,
            "weight: expected 0 or 1, got 0.5",
        ),
        (
            r#"{"messages": [{"role": "assistant", "content": "a"}], "tools": [1]}"#,
            "without tools, got \"tools\"",
        ),
        (r#"{"prompt": "a"}"#, "got \"prompt\": a text"),
        (
            r#"{"prompt": "a", "completion": []}"#,
            "expected two texts, or two lists of messages, got a text and a list",
        ),
        (r#"{"text": "a", "messages": []}"#, "got \"messages\": a list, \"text\": a text"),
    ] {
        let error = read(Some(CHATML), &format!("{good}\n{line}\n"), 500).unwrap_err().to_string();
        assert!(error.contains("chat.jsonl: line 2: ") && error.contains(": expected "), "{error}");
        assert!(error.contains(expected), "{error}");
    }
    let refusing = "{{ raise_exception('roles must alternate') }}";
    let error = read(Some(refusing), &good, 500).unwrap_err().to_string();
    assert!(error.contains("line 1") && error.contains("roles must alternate"), "{error}");
    let error = read(None, &format!("{{\"text\": \"a\"}}\n{good}"), 500).unwrap_err().to_string();
    assert!(error.contains("line 2") && error.contains("without a chat template"), "{error}");
}

/// Alpaca's and ShareGPT's records are the conversations that they stand for; JSON lists are read as lines are.
#[test]
fn records_of_other_data_sets_are_conversations() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer(dir.path());
    let of = |line: &str| {
        let read = read_with(&tokenizer, Some(CHATML), line, 500).unwrap();
        shown(&tokenizer, &read, 0)
    };
    let plain = of(&messages(&[("user", "the fox\n\nthe dog"), ("assistant", "hello")]));
    assert!(plain.1.starts_with("hello"), "{plain:?}");
    for line in [
        r#"{"instruction": "the fox", "input": "the dog", "output": "hello", "text": "Below is"}"#,
        r#"{"conversations": [{"from": "human", "value": "the fox\n\nthe dog"}, {"from": "gpt", "value": "hello"}]}"#,
        r#"{"id": 1, "conversations": [{"role": "user", "content": "the fox\n\nthe dog"}, {"from": "GPT", "value": "hello"}]}"#,
        r#"{"messages": [{"role": "user", "content": [{"type": "text", "text": "the fox\n\n"}, {"type": "text", "text": "the dog"}]}, {"role": "assistant", "content": "hello"}]}"#,
    ] {
        assert_eq!(of(line), plain, "{line}");
    }
    let system = of(&messages(&[("system", "the rules"), ("user", "fox"), ("assistant", "dog")]));
    for line in [
        r#"{"instruction": "fox", "input": "", "output": "dog", "system": "the rules"}"#,
        r#"{"system": "the rules", "conversations": [{"from": "human", "value": "fox"}, {"from": "gpt", "value": "dog"}]}"#,
        r#"{"system": "x", "conversations": [{"from": "system", "value": "the rules"}, {"from": "human", "value": "fox"}, {"from": "gpt", "value": "dog"}]}"#,
    ] {
        assert_eq!(of(line), system, "{line}");
    }
    // A tool's message is one of the conversation, and no answer.
    let tool =
        of(r#"{"conversations": [{"from": "tool", "value": "fox"}, {"from": "gpt", "value": "dog"}]}"#);
    assert!(tool.0.contains("<|im_start|>tool") && tool.1.starts_with("dog"), "{tool:?}");
    // A list, with a byte order mark.
    let list = "\u{feff}[\n{\"instruction\": \"a\",\n\"output\": \"b\"},\n{\"instruction\": \"a\", \"output\": 3}\n]";
    let path = dir.path().join("alpaca.json");
    std::fs::write(&path, list).unwrap();
    let mut render = |contexts: &[Value]| {
        Ok(contexts.iter().map(|c| chat::render(CHATML, c).map_err(|e| e.to_string())).collect())
    };
    let error = Conversations::read(&path, &tokenizer, 500, 1 << 30, Some(&mut render)).unwrap_err();
    assert!(error.to_string().contains("alpaca.json: item 2: output: expected a text"), "{error}");
    std::fs::write(&path, list.replace('3', "\"c\"")).unwrap();
    let read = Conversations::read(&path, &tokenizer, 500, 1 << 30, Some(&mut render)).unwrap();
    assert_eq!((read.len(), read.counts.rendered), (2, 2));
}

/// Lines without an answer are counted and left out, in every form; alone they are an error.
#[test]
fn lines_without_an_answer_are_left_out() {
    let good = messages(&[("user", "a"), ("assistant", "fox")]);
    let without = [
        r#"{"messages": []}"#,
        r#"{"messages": [{"role": "user", "content": "a"}]}"#,
        r#"{"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}"#,
        r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]}"#,
        r#"{"prompt": "a", "completion": ""}"#,
        r#"{"prompt": "a", "completion": null}"#,
        r#"{"prompt": [{"role": "user", "content": "a"}], "completion": []}"#,
        r#"{"prompt": [{"role": "user", "content": "a"}], "completion": null}"#,
        r#"{"text": ""}"#,
        r#"{"instruction": "a", "output": ""}"#,
        r#"{"conversations": [{"from": "human", "value": "a"}]}"#,
    ];
    for line in without {
        let found = read(Some(CHATML), &format!("{good}\n{line}\n{good}"), 500).unwrap();
        let Counts { lines, rendered, without_targets, too_long, ended, .. } = found.counts;
        assert_eq!(
            (lines, rendered, without_targets, too_long, ended, found.len()),
            (3, 2, 1, 0, 2, 2),
            "{line}"
        );
        assert_eq!(found.places.without_targets.as_deref(), Some("chat.jsonl: line 2"), "{line}");
        assert_eq!(found.line(0), found.line(1), "{line}");
        let error = read(Some(CHATML), line, 500).unwrap_err().to_string();
        let expected = "lines: expected a line with an answer, got 1 of 1 lines without any; fix: add lines with answers";
        assert!(error.ends_with(expected), "{error}");
        // No template is asked for.
        let text = r#"{"text": "the fox"}"#;
        assert_eq!(read(None, &format!("{line}\n{text}"), 500).unwrap().len(), 1, "{line}");
    }
}

#[test]
fn long_lines_keep_their_beginning_and_lines_without_answers_are_left_out() {
    let long = messages(&[("user", "the fox"), ("assistant", &"hello dog ".repeat(40))]);
    let late = messages(&[("user", &"hello dog ".repeat(40)), ("assistant", "the fox")]);
    let read_all = read(Some(CHATML), &format!("{long}\n{late}"), 30).unwrap();
    assert_eq!(
        read_all.counts,
        Counts {
            lines: 2,
            rendered: 2,
            cut: 1,
            too_long: 1,
            answer_tokens: read_all.counts.answer_tokens,
            ..lost(&long, &late)
        }
    );
    let first = |place: &Option<String>| place.clone().unwrap();
    assert_eq!(first(&read_all.places.cut), "chat.jsonl: line 1");
    assert_eq!(first(&read_all.places.too_long), "chat.jsonl: line 2");
    assert_eq!(read_all.line(0).0.len(), 30);
    // With the length that the counts name, nothing is lost.
    let whole = read(Some(CHATML), &format!("{long}\n{late}"), read_all.counts.longest).unwrap();
    let Counts { cut, too_long, lost_tokens, ended, .. } = whole.counts;
    assert_eq!((cut, too_long, lost_tokens, ended), (0, 0, 0, 2));
    // One token less cuts the end of each of the longest.
    let less = read(Some(CHATML), &format!("{long}\n{late}"), read_all.counts.longest - 1).unwrap();
    let Counts { cut, too_long, lost_tokens, .. } = less.counts;
    assert!(cut > 0 && too_long == 0 && lost_tokens == cut as u64, "{:?}", less.counts);
    let error = read(Some(CHATML), &late, 30).unwrap_err().to_string();
    assert!(error.contains("expected a line with an answer within 30 tokens"), "{error}");
}

/// Losses of these two lines at a length of 30, counted on the whole lines.
fn lost(long: &str, late: &str) -> Counts {
    let whole = read(Some(CHATML), &format!("{long}\n{late}"), 5000).unwrap();
    let beyond = |index: usize| whole.line(index).1[30..].to_vec();
    let all = [beyond(0), beyond(1)].concat();
    let longest = (0..2).map(|i| whole.line(i).0.len()).max().unwrap();
    Counts {
        lost_tokens: all.len() as u64,
        lost_answer_tokens: all.iter().filter(|target| **target != IGNORE_TARGET).count() as u64,
        longest,
        ..Counts::default()
    }
}

/// Tokens that follow the last answer are no loss, a cut first answer of two is, and a line of one token has no target.
#[test]
fn only_what_would_train_counts_as_lost() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer(dir.path());
    let two = messages(&[("user", "a"), ("assistant", "fox"), ("user", "b"), ("assistant", "slow dog")]);
    let whole = read_with(&tokenizer, Some(CHATML), &two, 500).unwrap();
    let needed = whole.counts.longest;
    assert_eq!((needed, whole.counts.ended, whole.counts.lost_tokens), (whole.line(0).0.len(), 1, 0));
    // The template's line break after the last answer lies beyond this length.
    let exact = read_with(&tokenizer, Some(CHATML), &two, needed).unwrap();
    assert_eq!((&exact, exact.places.cut.is_none()), (&whole, true));
    // The last token that counts, the end of the second answer, is cut; the first answer still ends.
    let cut = read_with(&tokenizer, Some(CHATML), &two, needed - 1).unwrap();
    let Counts { cut: lines, lost_tokens, lost_answer_tokens, ended, .. } = cut.counts;
    assert_eq!((lines, lost_tokens, lost_answer_tokens, ended), (1, 1, 1, 1));
    // One answer whose end is cut never ends.
    let one = messages(&[("user", "a"), ("assistant", "slow dog")]);
    let length = read_with(&tokenizer, Some(CHATML), &one, 500).unwrap().counts.longest - 1;
    assert_eq!(read_with(&tokenizer, Some(CHATML), &one, length).unwrap().counts.ended, 0);
    // An answer of weight 0 after the one that counts is no loss.
    let weighed = two.replace("\"slow dog\"", &format!("\"{}\", \"weight\": 0", "slow dog ".repeat(50)));
    let kept = read_with(&tokenizer, Some(CHATML), &weighed, needed).unwrap();
    assert_eq!((kept.counts.cut, kept.counts.lost_tokens, kept.counts.ended), (0, 0, 1));
}

/// The default template ends answers with the end-of-text token, and counts them only.
#[test]
fn the_default_template_marks_answers() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer(dir.path());
    let line = messages(&[
        ("system", "the rules"),
        ("user", "hello dog"),
        ("assistant", "hello fox"),
        ("user", "quick?"),
        ("assistant", "slow"),
    ]);
    let template = DefaultTemplate::dialogue(&tokenizer).unwrap();
    let read = read_with(&tokenizer, Some(&template.text), &line, 500).unwrap();
    let (all, found) = shown(&tokenizer, &read, 0);
    assert_eq!(found, " hello fox<|end|>| slow<|end|>", "{all}");
    let begin =
        "<|begin|>the rules\n\nUser: hello dog\nAssistant: hello fox<|end|>\nUser: quick?\nAssistant:";
    assert!(all.starts_with(begin), "{all}");
    let template = DefaultTemplate::joined(&tokenizer).unwrap();
    let context = chat::context(&[mantissa_model::Message::new("user", "hello")], &Default::default());
    assert_eq!(chat::render(&template.text, &context).unwrap(), "<|begin|>hello");
}

#[test]
fn lines_are_split_and_joined() {
    let (kept, held) = lines(60).split(&mut HoldOut::new(0.1));
    assert_eq!((kept.len() + held.len(), kept.counts.lines, held.counts.lines), (60, 60, held.len()));
    assert!((4..=10).contains(&held.len()), "{}", held.len());
    let sum = lines(60).counts.answer_tokens;
    assert_eq!(kept.counts.answer_tokens + held.counts.answer_tokens, sum);
    let (mut both, other) = (kept.clone(), held.clone());
    both.append(other);
    assert_eq!((both.len(), both.counts.answer_tokens), (60, sum));
    assert_eq!(both.line(kept.len()), held.line(0));
}

/// Lines of 1 to 20 inputs.
fn lines(count: usize) -> Conversations {
    let mut lines = Conversations::default();
    for i in 0..count {
        let len = 2 + (i * 7 + i * i) % 20;
        let tokens: Vec<u32> = (0..len).map(|j| (i * 100 + j) as u32).collect();
        let line = Encoded { tokens, counted: vec![true; len], ends: Vec::new() };
        lines.push(&line, 20, String::new);
    }
    lines
}

#[test]
fn every_line_is_in_one_window_and_windows_are_full() {
    let batches = ChatBatches::new(lines(200), 100_000, 20, 5, Cursor::default()).unwrap();
    let mut all: Vec<u32> = batches.windows.concat();
    all.sort_unstable();
    assert_eq!(all, (0..200).collect::<Vec<_>>());
    let len = |window: &Vec<u32>| {
        window.iter().map(|&line| batches.lines.line(line as usize).0.len()).sum::<usize>()
    };
    assert!(batches.windows.iter().all(|window| len(window) <= 20));
    assert!(batches.fill() > 0.9, "{}", batches.fill());
    assert!(ChatBatches::new(lines(3), 100_000, 5, 5, Cursor::default()).is_err());
    assert!(ChatBatches::new(Conversations::default(), 100_000, 5, 5, Cursor::default()).is_err());
}

#[test]
fn the_order_depends_on_seed_and_epoch_only() {
    let batches = |seed, cursor| ChatBatches::new(lines(60), 100_000, 20, seed, cursor).unwrap();
    let take = |batches: &mut ChatBatches, count: usize| {
        let mut sample = Sample::default();
        batches.next(count, &mut sample).unwrap();
        assert_eq!(sample.lens.iter().sum::<usize>(), sample.tokens.len());
        assert_eq!(sample.targets.len(), sample.tokens.len());
        assert_eq!(sample.counted(), sample.tokens.len());
        sample
    };
    let mut first = batches(1, Cursor::default());
    let per_epoch = first.windows() as usize;
    let epochs = [take(&mut first, per_epoch), take(&mut first, per_epoch)];
    assert_eq!(first.cursor(), Cursor { epoch: 1, taken: per_epoch as u64 });
    let sorted = |sample: &Sample| {
        let mut tokens = sample.tokens.clone();
        tokens.sort_unstable();
        tokens
    };
    assert_eq!(sorted(&epochs[0]), sorted(&epochs[1]));
    assert_ne!(epochs[0], epochs[1]);
    assert_ne!(take(&mut batches(2, Cursor::default()), per_epoch), epochs[0]);
    // From any position on, as if the run had never stopped.
    let mut whole = batches(1, Cursor::default());
    take(&mut whole, 5);
    let mut resumed = batches(1, whole.cursor());
    assert_eq!(take(&mut resumed, per_epoch), take(&mut whole, per_epoch));
}

#[test]
fn lines_are_written_and_opened_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lines.safetensors");
    let written = lines(9);
    let about = [("made_from".to_owned(), "x".to_owned())].into();
    written.write(&mantissa_store::Output::owned(&path), 5000, about).unwrap();
    let (read, vocab_size, about) = Conversations::open(&path).unwrap();
    assert_eq!((read, vocab_size, about["made_from"].as_str()), (written.clone(), 5000, "x"));
    // Ids outside the vocabulary, and a damaged file.
    let other = dir.path().join("other.safetensors");
    written.write(&mantissa_store::Output::owned(&other), 300, Default::default()).unwrap();
    assert!(Conversations::open(&other).is_err());
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&path, bytes).unwrap();
    assert!(Conversations::open(&path).is_err());
}
