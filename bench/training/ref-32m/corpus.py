#!/usr/bin/env python3
"""Collects the training text of ref-32m, trains its tokenizer and cuts the windows it is measured on.

    corpus.py SOURCES TEXT_DIR OUT_DIR

Needs the Python package tokenizers.

SOURCES holds books/ (git work tree of mlschmitt/classic-books-markdown, public domain), cpp-docs/ (MicrosoftDocs/cpp-docs, CC-BY),
x/PACKAGE (Debian packages unpacked: anarchism, debian-handbook, postgresql-doc-15, python3.11-doc, linux-doc-6.1, sqlite3-doc,
libreoffice-help-en-us, octave-doc, gimp-help-en, dict-gcide), rust/ (sources of crates) and nltk/ (abc, brown, movie reviews).
TEXT_DIR is the folder of evaluation texts (tinystories-train-first1000.txt and the others). OUT_DIR gets train.txt, documents in
random order ended by <|endoftext|>, held-out.txt (every 150th document), tokenizer.json (byte-level BPE, 8192 tokens) and
windows.json: windows of 512 tokens for calibration (`calib`, 128 of the training text) and evaluation (`eval_mix`, 96 of
held-out.txt, and 24 each of stories, WikiText-2, code and plays that are not trained on).

Left out of training: Shakespeare's plays but for nine tenths of tinyshakespeare.txt, stories 1 to 128, the last fifth of
code-rust-alloc.txt, and WikiText-2.
"""

import gzip
import html.parser
import json
import pathlib
import random
import re
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# Characters taken of each kind.
LIMITS = {"books": 62e6, "docs": 24e6, "code": 14e6, "nltk": 9e6}
END = "\n<|endoftext|>\n"


class Text(html.parser.HTMLParser):
    """Text of the body, one line for each block."""

    BLOCK = {"p", "div", "li", "tr", "h1", "h2", "h3", "h4", "h5", "pre", "dt", "dd", "br", "table", "section"}
    SKIP = {"script", "style", "head", "nav", "footer", "header", "aside"}

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.parts, self.skip, self.pre = [], 0, 0

    def handle_starttag(self, tag, attrs):
        self.skip += tag in self.SKIP
        self.pre += tag == "pre"
        if tag in self.BLOCK:
            self.parts.append("\n")

    def handle_endtag(self, tag):
        self.skip -= tag in self.SKIP and self.skip > 0
        self.pre -= tag == "pre" and self.pre > 0
        if tag in self.BLOCK:
            self.parts.append("\n")

    def handle_data(self, data):
        if not self.skip:
            self.parts.append(data if self.pre else re.sub(r"\s+", " ", data))


def read(path):
    data = gzip.open(path).read() if path.suffix in (".gz", ".dz") else path.read_bytes()
    return data.decode("utf-8", "ignore").replace("\r\n", "\n")


def page(path):
    parser = Text()
    parser.feed(read(path))
    text = "".join(parser.parts)
    text = "\n".join(line.rstrip().replace("¶", "").replace("\ue000", "") for line in text.split("\n"))
    return re.sub(r"\n[ \n]*\n", "\n\n", text).strip()


def english(text):
    letters = sum(c.isascii() for c in text[:4000])
    return len(text) > 400 and letters > 0.97 * len(text[:4000])


def pieces(text, size):
    """Cuts a long text at blank lines."""
    piece, length = [], 0
    for paragraph in text.split("\n\n"):
        piece.append(paragraph)
        length += len(paragraph)
        if length > size:
            yield "\n\n".join(piece)
            piece, length = [], 0
    if length > 300:
        yield "\n\n".join(piece)


def books(root):
    for path in sorted(root.glob("*/*.md")):
        if "Shakespeare" in str(path):
            continue
        text = re.sub(r"!\[[^\]]*\]\([^)]*\)|\[\^?\d+\]|<[^>]{1,200}>|^---.*?^---$", "", read(path), flags=re.S | re.M)
        text = re.sub(r"\n{3,}", "\n\n", text).strip()
        if english(text):
            yield from pieces(text, 12000)


def docs(root, others):
    for package in sorted(others.iterdir()):
        if package.name.startswith(("lilypond", "libstdc", "python-pandas", "python-scipy", "python-sklearn", "r-doc", "golang")):
            continue
        lines = {}
        texts = [page(p) for p in sorted(package.rglob("*.html")) if p.is_file() and ("handbook" not in str(p) or "en-US" in str(p))]
        for text in texts:
            for line in set(text.split("\n")):
                lines[line] = lines.get(line, 0) + 1
        for text in texts:
            kept = "\n".join(line for line in text.split("\n") if not line or lines[line] < 12 or line.startswith(" "))
            kept = re.sub(r"\n{3,}", "\n\n", kept)
            if english(kept):
                yield from pieces(kept, 8000)
    for path in sorted(root.rglob("*.md")):
        text = re.sub(r"^---.*?^---\s*", "", read(path), count=1, flags=re.S | re.M)
        if english(text):
            yield from pieces(text, 8000)
    gcide = next(others.glob("dict-gcide/**/*.dict.dz"))
    yield from (p for p in pieces(read(gcide), 6000))


def code(root):
    for path in sorted(root.rglob("*.rs")):
        if path.stat().st_size < 200_000 and "generated" not in str(path) and "/windows" not in str(path):
            text = read(path)
            if english(text) and max(map(len, text.split("\n"))) < 300:
                yield from pieces(text, 10000)


def nltk(root):
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.suffix in (".txt", "") and "README" not in path.name and "CONTENTS" not in path.name and "cats" not in path.name:
            text = read(path)
            if "/brown/" in str(path):
                text = re.sub(r"(\S+)/\S+", r"\1", text)
                text = re.sub(r" ([.,;:!?)'])", r"\1", text)
            if english(text):
                yield from pieces(text, 8000)


def evaluated(folder):
    """Training parts of the evaluation texts."""
    text = (folder / "tinystories-train-first1000.txt").read_text()
    stories = [s.strip() for s in text.split("<|endoftext|>") if s.strip()][128:]
    articles = re.findall(r"<doc [^>]*>\n(.*?)</doc>", (folder / "wikipedia-cal.txt").read_text(), re.S)
    articles = [re.sub(r"\n{3,}", "\n\n", a).strip() for a in articles if len(a) > 300]
    wiki = re.split(r"\n(?= = [^=])", (folder / "wikitext103-raw-train-first1000.txt").read_text())
    plays = (folder / "tinyshakespeare.txt").read_text()
    rust = (folder / "code-rust-alloc.txt").read_text()
    yield from stories + articles + [w for w in wiki if len(w) > 300]
    yield from pieces(plays[: len(plays) * 9 // 10], 6000)
    yield from pieces(rust[: len(rust) * 8 // 10], 10000)


def train_tokenizer(documents, path):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8192, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.save(str(path))
    return tokenizer


def windows(tokenizer, documents, count, size=512):
    ids = []
    for document in documents:
        ids += tokenizer.encode(document).ids + [0]
        if len(ids) >= count * size:
            break
    return [ids[i : i + size] for i in range(0, len(ids) - size + 1, size)][:count]


def measured(folder):
    """Texts of the evaluation, by name; none of them is trained on."""
    text = (folder / "tinystories-train-first1000.txt").read_text()
    plays, rust = (folder / "tinyshakespeare.txt").read_text(), (folder / "code-rust-alloc.txt").read_text()
    return {
        "eval_stories": [s.strip() for s in text.split("<|endoftext|>") if s.strip()][:128],
        "eval_wiki": [(folder / "wikitext2-raw-test.txt").read_text()],
        "eval_code": [rust[len(rust) * 8 // 10 :]],
        "eval_shakespeare": [plays[len(plays) * 9 // 10 :]],
    }


def main():
    sources, texts, out = map(pathlib.Path, sys.argv[1:])
    random.seed(1)
    everything = list(evaluated(texts))
    print("evaluated", len(everything), sum(map(len, everything)) / 1e6)
    for name, documents in [("books", books(sources / "books")), ("docs", docs(sources / "cpp-docs", sources / "x")), ("code", code(sources / "rust")), ("nltk", nltk(sources / "nltk"))]:
        documents = list(documents)
        total = sum(map(len, documents))
        random.shuffle(documents)
        taken, size = [], 0
        for document in documents:
            if size > LIMITS[name]:
                break
            taken.append(document.replace("<|endoftext|>", ""))
            size += len(document)
        print(name, "has", total / 1e6, "MB, taken", size / 1e6, len(taken))
        everything += taken
    random.shuffle(everything)
    out.mkdir(exist_ok=True)
    held = everything[::150]
    train = [d for i, d in enumerate(everything) if i % 150]
    (out / "train.txt").write_text(END.join(train) + END)
    (out / "held-out.txt").write_text(END.join(held) + END)
    tokenizer = train_tokenizer(random.sample(train, 4500), out / "tokenizer.json")
    cut = {"calib": windows(tokenizer, train[:3000], 128), "eval_mix": windows(tokenizer, held, 96)}
    cut |= {name: windows(tokenizer, [t[:90_000] for t in parts], 24) for name, parts in measured(texts).items()}
    (out / "windows.json").write_text(json.dumps(cut))
    print(len(train), "documents", sum(map(len, train)) / 1e6, "MB;", len(held), "held out")


if __name__ == "__main__":
    main()
