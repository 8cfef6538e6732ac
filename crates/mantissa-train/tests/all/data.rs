//! Text to tokens to batches, in files.
use std::collections::BTreeMap;
use std::path::Path;

use mantissa_train::data::{
    Batches, Cursor, DataError, Sample, TextFormat, TokenFile, TokenWriter, documents,
};
use tempfile::TempDir;

fn write_tokens(path: &Path, vocab_size: usize, ids: &[u32]) {
    let mut writer = TokenWriter::new(vocab_size);
    ids.chunks(7).for_each(|ids| writer.push(ids).unwrap());
    assert_eq!(writer.len(), ids.len());
    let about = BTreeMap::from([("made from".to_owned(), "a test".to_owned())]);
    writer.finish(&mantissa_store::Output::owned(path), about).unwrap();
}

#[test]
fn tokens_of_narrow_and_wide_vocabularies_round_trip() {
    let temp = TempDir::new().unwrap();
    for (vocab_size, bytes) in [(300, 2), (65_536, 2), (65_537, 4)] {
        let path = temp.path().join(format!("{vocab_size}.safetensors"));
        let ids: Vec<u32> = (0..1000u32).map(|i| (i * 7919) % vocab_size as u32).collect();
        write_tokens(&path, vocab_size, &ids);
        let file = TokenFile::open(&path).unwrap();
        assert_eq!((file.len(), file.vocab_size()), (1000, vocab_size));
        assert_eq!(file.about()["made from"], "a test");
        let (mut part, mut all) = (vec![9], Vec::new());
        file.read(100, 5, &mut part).unwrap();
        file.read(0, 1000, &mut all).unwrap();
        assert_eq!((part[0], &part[1..], &all), (9, &ids[100..105], &ids));
        assert!(file.read(998, 3, &mut part).is_err());
        let size = std::fs::metadata(&path).unwrap().len();
        assert!((1000 * bytes..1000 * bytes + 300).contains(&size), "{size}");
    }
    assert!(
        TokenWriter::new(5)
            .push(&[5])
            .unwrap_err()
            .to_string()
            .contains("expected below 5, the model's vocabulary, got 5")
    );
}

/// More tokens than a writer holds in memory give the same file, and leave no temporary one.
#[test]
fn tokens_beside_an_output_are_the_same_file() {
    let temp = TempDir::new().unwrap();
    let ids: Vec<u32> = (0..1_300_000u32).map(|i| (i % 1009 * 7919) % 300).collect();
    let (held, spilled) = (temp.path().join("held"), temp.path().join("spilled"));
    write_tokens(&held, 300, &ids);
    let mut writer = TokenWriter::beside(300, &temp.path().join("run"), "tokens");
    ids.chunks(1000).for_each(|ids| writer.push(ids).unwrap());
    assert_eq!(writer.len(), ids.len());
    let names =
        || std::fs::read_dir(temp.path()).unwrap().map(|file| file.unwrap().file_name()).collect::<Vec<_>>();
    assert!(
        names().iter().any(|name| name.to_string_lossy().starts_with(".run.mantissa-tokens")),
        "{:?}",
        names()
    );
    let about = BTreeMap::from([("made from".to_owned(), "a test".to_owned())]);
    writer.finish(&mantissa_store::Output::owned(&spilled), about).unwrap();
    assert!(std::fs::read(&held).unwrap() == std::fs::read(&spilled).unwrap());
    assert_eq!(names().len(), 2, "{:?}", names());
    // One that is given up removes its file too.
    let mut writer = TokenWriter::beside(300, &temp.path().join("run"), "tokens");
    writer.push(&ids).unwrap();
    drop(writer);
    assert_eq!(names().len(), 2, "{:?}", names());
}

/// A token file of another program has neither checksum nor vocabulary size.
#[test]
fn token_files_of_others_are_data() {
    let temp = TempDir::new().unwrap();
    let path = temp.path().join("t.safetensors");
    let specs = vec![mantissa_store::TensorSpec::new("tokens", mantissa_store::Dtype::U16, [3])];
    let mut writer = mantissa_store::SafetensorsWriter::create(&path, specs, BTreeMap::new()).unwrap();
    writer.write("tokens", &[1, 0, 2, 0, 5, 0]).unwrap();
    writer.finish().unwrap();
    assert!(TokenFile::open(&path).is_err());
    let file = TokenFile::open_data(&path, 6).unwrap();
    let mut ids = Vec::new();
    file.read(0, 3, &mut ids).unwrap();
    assert_eq!((file.vocab_size(), &ids[..]), (6, &[1, 2, 5][..]));
    let narrow = TokenFile::open_data(&path, 5).unwrap();
    assert!(narrow.read(0, 3, &mut ids).unwrap_err().to_string().contains("below 5"));
}

#[test]
fn another_file_is_not_one_of_tokens() {
    let temp = TempDir::new().unwrap();
    let path = temp.path().join("x.safetensors");
    std::fs::write(&path, b"\x02\0\0\0\0\0\0\0{}").unwrap();
    assert!(matches!(TokenFile::open(&path), Err(DataError::Store(mantissa_store::Error::Field(_)))));
    assert!(TokenFile::open(&temp.path().join("none")).is_err());
}

#[test]
fn an_epoch_visits_every_window_once_and_a_cursor_resumes() {
    let temp = TempDir::new().unwrap();
    let path = temp.path().join("t.safetensors");
    // 10 windows of 8 and the token after them; two more tokens are never used.
    let ids: Vec<u32> = (0..83).collect();
    write_tokens(&path, 100, &ids);
    let batches = |cursor| Batches::new(TokenFile::open(&path).unwrap(), 8, 5, cursor).unwrap();
    let take = |batches: &mut Batches, count: usize| {
        let mut sample = Sample::default();
        batches.next(count, &mut sample).unwrap();
        assert!(sample.tokens.iter().zip(&sample.targets).all(|(a, b)| a + 1 == *b));
        assert_eq!(sample.lens, vec![8; count]);
        sample.tokens
    };
    let mut all = batches(Cursor::default());
    assert_eq!(all.windows(), 10);
    let order: Vec<u32> = (0..7).flat_map(|_| take(&mut all, 3)).collect();
    assert_eq!(all.cursor(), Cursor { epoch: 2, taken: 1 });
    for epoch in order.chunks_exact(80) {
        let mut seen = epoch.to_vec();
        seen.sort_unstable();
        assert_eq!(seen, ids[..80]);
    }
    assert_ne!(order[..80], order[80..160]);
    // Stopped after every batch and resumed from the cursor.
    let mut cursor = Cursor::default();
    let mut resumed = Vec::new();
    for _ in 0..7 {
        let mut part = batches(cursor);
        resumed.extend(take(&mut part, 3));
        cursor = part.cursor();
    }
    assert_eq!(resumed, order);
    let short = Batches::new(TokenFile::open(&path).unwrap(), 83, 5, Cursor::default());
    assert!(short.unwrap_err().to_string().contains("got 83 for windows of 83"));
}

#[test]
fn documents_of_text_and_of_json_lines() {
    let temp = TempDir::new().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = temp.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let all = |path: &Path, format: &TextFormat| {
        let mut found = Vec::new();
        let count = documents(path, format, |document| {
            found.push(document.to_owned());
            Ok(())
        });
        count.map(|count| {
            assert_eq!(count, found.len());
            found
        })
    };
    let text = file("a.txt", b" one\n<|end|>\n\n<|end|>two <|end|>");
    let split = TextFormat::Text { split: Some("<|end|>".into()) };
    assert_eq!(all(&text, &split).unwrap(), ["one", "two"]);
    assert_eq!(all(&text, &TextFormat::Text { split: None }).unwrap().len(), 1);
    let lines = TextFormat::JsonLines { field: "text".into() };
    let json =
        file("a.jsonl", b"{\"text\": \"one\", \"n\": 1}\n\n{\"text\": \"\"}\n{\"text\": \"t\\u0077o\"}\n");
    assert_eq!(all(&json, &lines).unwrap(), ["one", "two"]);
    let message = |path: &Path, format| all(path, format).unwrap_err().to_string();
    let bad = file("b.jsonl", b"{\"text\": \"one\"}\n{\"txt\": \"two\"}\n");
    assert!(message(&bad, &lines).contains("b.jsonl: line 2: expected a JSON object"));
    assert!(message(&file("c.jsonl", b"{"), &lines).contains("line 1"));
    assert!(message(&file("d.txt", b"ab\xff"), &split).contains("invalid UTF-8 at byte 2"));
    assert!(message(&temp.path().join("none.txt"), &split).contains("no such file"));
}
