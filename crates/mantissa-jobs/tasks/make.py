"""Writes the built-in task files: cloze.jsonl, retrieval.jsonl, arithmetic.jsonl, format.jsonl.

All texts are written for these tasks: no model has been trained on them. `python3 make.py` gives the same bytes each time.
"""

import json
import random
from pathlib import Path

HERE = Path(__file__).parent
NAMES = ["Ana", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Ivy", "Jack", "Kate", "Leo", "Mia", "Nora",
         "Oscar", "Paul", "Rose", "Sam", "Tim", "Lucy", "Max", "Lily", "Tom", "Anna", "Peter", "Sara", "Mark", "Ella",
         "Bob", "Jane", "Will", "Amy"]
THINGS = ["ball", "book", "cat", "dog", "hat", "cup", "kite", "bike", "doll", "boat", "car", "drum", "fish", "bird", "cake",
          "apple", "lamp", "bell", "coat", "rope", "box", "chair", "flower", "stone", "train", "bag", "key", "spoon",
          "clock", "shoe", "pen", "bear"]
COLORS = ["red", "blue", "green", "yellow", "white", "black", "brown", "pink"]
PLACES = ["park", "garden", "kitchen", "school", "forest", "beach", "farm", "river"]

# Sentences whose last word follows from the rest: text, right word, three wrong ones.
SENSE = [
    ("It was raining hard. {a} did not want to get wet, so {a} opened the", "umbrella", ["window", "cake", "song"]),
    ("The sun went down and the sky was dark. {a} looked up and saw the moon and the", "stars", ["shoes", "fish", "bread"]),
    ("{a} was very thirsty. {a} asked for a glass of", "water", ["sand", "paper", "wood"]),
    ("{a} was hungry. {a} made a sandwich and began to", "eat", ["swim", "fly", "melt"]),
    ("The dog saw a stranger at the door. It began to", "bark", ["read", "sing", "bloom"]),
    ("The bird opened its wings and began to", "fly", ["cook", "write", "drive"]),
    ("It was winter. The snow was cold and", "white", ["hot", "loud", "sweet"]),
    ("{a} fell and hurt a knee. {a} was sad and began to", "cry", ["laugh", "grow", "shine"]),
    ("It was late and {a} was very tired. {a} went to", "bed", ["war", "lunch", "sea"]),
    ("{a} wanted to cut the paper. {a} looked for the", "scissors", ["pillow", "soup", "moon"]),
    ("The room was dark. {a} turned on the", "light", ["bread", "grass", "story"]),
    ("{a} baked a cake for the party. Everyone said that it was", "delicious", ["asleep", "angry", "empty"]),
    ("The cat saw a little mouse. The cat ran after the", "mouse", ["cloud", "house", "tree"]),
    ("{a} dropped the glass on the floor. The glass", "broke", ["smiled", "slept", "sang"]),
    ("The farmer went to the barn to milk the", "cow", ["car", "hill", "book"]),
    ("{a} had a cold, so Mom took {a} to see the", "doctor", ["ocean", "circus", "bakery"]),
    ("They planted a seed and gave it water every day. It grew into a tall", "tree", ["river", "chair", "lion"]),
    ("{a} lost a toy and looked everywhere. At last {a} found it under the", "bed", ["sun", "sky", "rain"]),
    ("Grandma told a funny joke and {a} began to", "laugh", ["freeze", "burn", "rain"]),
    ("The fire was very", "hot", ["wet", "cold", "quiet"]),
    ("{a} put on a coat because it was", "cold", ["tasty", "tall", "noisy"]),
    ("{a} swam in the blue", "sea", ["bread", "tower", "shirt"]),
    ("The baby was asleep, so {a} had to be very", "quiet", ["yellow", "wooden", "loud"]),
    ("{a} wrote a letter and put it into an", "envelope", ["oven", "egg", "ocean"]),
    ("{a} found a key and used it to open the", "door", ["wind", "milk", "snow"]),
    ("Bees fly from flower to flower to make", "honey", ["paper", "smoke", "stones"]),
    ("{a} brushed teeth with a tooth", "brush", ["fairy", "cloud", "truck"]),
    ("The teacher asked a question and {a} raised a", "hand", ["house", "storm", "spoon"]),
    ("The train stopped at the", "station", ["banana", "cloud", "kitten"]),
    ("{a} said sorry, and the two friends were happy", "again", ["under", "green", "seven"]),
]


def write(name, items):
    lines = [json.dumps(item, ensure_ascii=False) for item in items]
    (HERE / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def shuffled(rng, right, wrong):
    choices = [right, *wrong]
    rng.shuffle(choices)
    return [f" {choice}" for choice in choices], choices.index(right)


def cloze():
    rng, items = random.Random(1), []
    for i, (text, right, wrong) in enumerate(SENSE):
        choices, answer = shuffled(rng, right, wrong)
        prompt = text.format(a=rng.choice(NAMES))
        items.append({"id": f"sense-{i}", "group": "sense", "prompt": prompt, "choices": choices, "answer": answer})
    for i in range(90):
        a, b = rng.sample(NAMES, 2)
        things, (color, other), place = rng.sample(THINGS, 5), rng.sample(COLORS, 2), rng.choice(PLACES)
        story = rng.choice([
            "One day, {a} went to the {place} with a {color} {x}. {b} had a {other} {y}. They played all day. When it was "
            "time to go home, {a} could not find the {color}",
            "{a} had a {color} {x} and loved it very much. {b} came to the {place} with a {other} {y}. \"Can I play with "
            "you?\" asked {b}. \"Yes,\" said {a}. \"You can play with my {color}",
            "Once there was a {color} {x} in the {place}. Next to it was a {other} {y}. {a} and {b} came to look. {b} took "
            "the {other} {y}, and {a} took the {color}",
        ])
        prompt = story.format(a=a, b=b, x=things[0], y=things[1], color=color, other=other, place=place)
        choices, answer = shuffled(rng, things[0], things[1:4])
        items.append({"id": f"story-{i}", "group": "story", "prompt": prompt, "choices": choices, "answer": answer})
    write("cloze", items)


def retrieval():
    rng, items = random.Random(2), []
    for distance in (1, 4, 8, 11):
        for i in range(45):
            names, things = rng.sample(NAMES, distance + 3), rng.sample(THINGS, distance + 3)
            # The pair that is asked for is the second one; `distance` pairs follow it.
            lines = [f"{name} has a {thing}." for name, thing in zip(names, things)][: distance + 2]
            wrong = rng.sample([t for t in things[: distance + 2] if t != things[1]], min(3, distance + 1))
            choices, answer = shuffled(rng, things[1], wrong)
            prompt = " ".join(lines) + f" {names[1]} has a"
            group = f"{distance} pair{'s' if distance > 1 else ''} between"
            items.append({"id": f"{distance}-{i}", "group": group, "prompt": prompt, "choices": choices, "answer": answer})
    write("retrieval", items)


def arithmetic():
    rng, items = random.Random(3), []
    for digits in (1, 2, 3, 4):
        for i in range(45):
            low, high = (0 if digits == 1 else 10 ** (digits - 1)), 10**digits - 1
            shown = [(rng.randint(low, high), rng.randint(low, high)) for _ in range(3)]
            a, b = rng.randint(low, high), rng.randint(low, high)
            prompt = "".join(f"{x} + {y} = {x + y}\n" for x, y in shown) + f"{a} + {b} ="
            group = f"{digits} digit" + ("s" if digits > 1 else "")
            items.append({"id": f"{digits}-{i}", "group": group, "prompt": prompt, "target": str(a + b), "stop": ["\n"],
                          "max_tokens": 12})
    write("arithmetic", items)


def formats():
    rng, items = random.Random(4), []

    def spelled(word):
        return "-".join(word)

    kinds = [
        ("capital letters", "exact", lambda a, b, n: (f"{a} {b}", f"{a} {b}".upper())),
        ("list", "exact", lambda a, b, n: (f"{a} and {b} and {n}", f"[{a}, {b}, {n}]")),
        ("JSON", "json", lambda a, b, n: (f"{a} is {n}", json.dumps({"name": a, "count": n}))),
        ("letters", "exact", lambda a, b, n: (a, spelled(a))),
    ]
    for group, match, make in kinds:
        for i in range(45):
            shown, asked = [], None
            for a, b in zip(rng.sample(THINGS, 4), rng.sample(COLORS, 4)):
                asked = make(a, b, rng.randint(2, 9))
                shown.append(f"{asked[0]} -> {asked[1]}")
            prompt = "\n".join(shown[:3]) + f"\n{asked[0]} ->"
            items.append({"id": f"{group.replace(' ', '-').lower()}-{i}", "group": group, "prompt": prompt,
                          "target": asked[1], "match": match, "stop": ["\n"], "max_tokens": 40})
    write("format", items)


cloze()
retrieval()
arithmetic()
formats()
