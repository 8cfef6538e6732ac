#!/usr/bin/env python3
"""Makes bigram.json, the bigram model that the embedded model must beat.

    bigram.py TOKENIZER_DIR PREPARED_DIR > bigram.json      (needs the PyPI package tokenizers)

An interpolated bigram with absolute discounting (Ney, Essen and Kneser 1994): p(w|v) = max(c(v,w) - d, 0) / c(v) + d n(v) / c(v) p(w),
n(v) the number of different tokens after v, p(w) the unigram with one added to each count. Counts are from the training text,
tokenized by the model's tokenizer. The discount d is optimal for the held-out text itself, which favours the bigram model. Windows are those of the demo: each
document cut into 255 tokens with the BOS before them, an incomplete last window dropped unless it is the only one.
"""

import collections
import json
import math
import pathlib
import sys

from tokenizers import Tokenizer

END = "<|endoftext|>"
BEGIN, STOP, VOCAB, BLOCK = 0, 1, 2048, 255


def documents(path):
    return [d.strip() for d in path.read_text(encoding="utf-8").split(END) if d.strip()]


def main():
    tokenizer = Tokenizer.from_file(str(pathlib.Path(sys.argv[1]) / "tokenizer.json"))
    prepared = pathlib.Path(sys.argv[2])
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    pairs, unigram = collections.defaultdict(collections.Counter), collections.Counter()
    for name in ("stories", "prose", "code"):
        for document in documents(prepared / "train" / f"{name}.txt"):
            ids = [BEGIN, *encode(document), STOP]
            unigram.update(ids[1:])
            for a, b in zip(ids, ids[1:]):
                pairs[a][b] += 1
    total = sum(unigram.values()) + VOCAB
    count = {a: sum(after.values()) for a, after in pairs.items()}

    def nll(windows, d):
        loss, n = 0.0, 0
        for ids in windows:
            for a, b in zip(ids, ids[1:]):
                p = (unigram[b] + 1) / total
                if a in count:
                    p = max(pairs[a][b] - d, 0) / count[a] + d * len(pairs[a]) / count[a] * p
                loss -= math.log(p)
                n += 1
        return loss / n, n

    result = {}
    for name in ("stories", "prose", "code"):
        windows = []
        for document in documents(prepared / "held-out" / f"{name}.txt"):
            ids = encode(document)
            cut = [ids[i : i + BLOCK] for i in range(0, len(ids), BLOCK)]
            windows += [[BEGIN, *w] for i, w in enumerate(cut) if len(w) == BLOCK or i == 0]
        best = min((nll(windows, d / 20) + (d / 20,) for d in range(2, 20)), key=lambda x: x[0])
        result[name] = {"nll": round(best[0], 4), "tokens": best[1], "discount": best[2]}
    print(json.dumps(result, indent=1))


main()
