#!/usr/bin/env python3
"""Prepares the training and evaluation texts of the embedded model.

    prepare.py TEXT_DIR OUT_DIR

TEXT_DIR holds tinystories-train-first1000.txt, wikipedia-cal.txt, wikitext103-raw-train-first1000.txt and code-rust-alloc.txt
(NOTICE.md names their sources). OUT_DIR gets train/*.txt, documents ended by a line <|endoftext|>, held-out/*.txt, about
24 KB for each domain, and calibration.txt, 24 documents of each domain out of train/. No document is in both sets, and texts of the project's evaluations are excluded. Training uses stories
129 to 1000, the code without its first twentieth and last fifth, and wikipedia-cal without its last twentieth.
"""

import pathlib
import re
import sys

END = "\n<|endoftext|>\n"
HELD_OUT_BYTES = 24_000
CALIBRATION_DOCUMENTS = 24
CALIBRATION_CHARACTERS = 1200


def read(folder, name):
    return (folder / name).read_text(encoding="utf-8")


def first_bytes(documents, limit=HELD_OUT_BYTES):
    """Returns the documents that begin within `limit` bytes."""
    taken, size = [], 0
    for document in documents:
        if size >= limit:
            break
        taken.append(document)
        size += len(document.encode())
    return taken


def stories(folder):
    text = read(folder, "tinystories-train-first1000.txt")
    documents = [story.strip() for story in text.split("<|endoftext|>") if story.strip()]
    return documents[128:], first_bytes(documents[:128])


def encyclopedia(folder):
    articles = re.findall(r"<doc [^>]*>\n(.*?)</doc>", read(folder, "wikipedia-cal.txt"), re.S)
    articles = [re.sub(r"\n{3,}", "\n\n", article).strip() for article in articles]
    articles = [article for article in articles if len(article) >= 300]
    cut = len(articles) * 19 // 20
    # Undo WikiText's spacing of punctuation, so that all prose has one form.
    wiki = read(folder, "wikitext103-raw-train-first1000.txt")
    wiki = re.sub(r" @(.)@ ", r"\1", wiki)
    wiki = re.sub(r" ([.,;:!?)'\]])", r"\1", wiki).replace("( ", "(").replace("[ ", "[")
    wiki = re.sub(r'" ([^"]*?) "', r'"\1"', wiki)
    paragraphs = [p.strip() for p in re.split(r"\n(?= = [^=])", wiki) if len(p.strip()) >= 300]
    return articles[:cut] + paragraphs, first_bytes(articles[cut:])


def code(folder):
    text = read(folder, "code-rust-alloc.txt")
    at = lambda share: text.index("\n", int(len(text) * share)) + 1
    train = text[at(0.05) : at(0.80)]
    held = text[at(0.90) :]

    # Documents of some thousand characters, cut at empty lines.
    def cut(text):
        pieces, piece = [], ""
        for part in re.split(r"(?<=\n\n)", text):
            piece += part
            if len(piece) >= 3000:
                pieces.append(piece.strip("\n"))
                piece = ""
        return pieces

    return cut(train), first_bytes(cut(held))


def main():
    folder, out = map(pathlib.Path, sys.argv[1:3])
    for part in ("train", "held-out"):
        (out / part).mkdir(parents=True, exist_ok=True)
    calibration = []
    for name, domain in (("stories", stories), ("prose", encyclopedia), ("code", code)):
        train, held_out = domain(folder)
        step = len(train) // CALIBRATION_DOCUMENTS
        calibration += [d[:CALIBRATION_CHARACTERS].strip() for d in train[::step]][:CALIBRATION_DOCUMENTS]
        for part, documents in zip(("train", "held-out"), (train, held_out)):
            text = "".join(document + END for document in documents)
            (out / part / f"{name}.txt").write_text(text, encoding="utf-8")
            print(f"{part}/{name}: {len(documents)} documents, {len(text.encode())} bytes")
    text = "".join(document + END for document in calibration)
    (out / "calibration.txt").write_text(text, encoding="utf-8")


main()
