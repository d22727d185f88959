"""Synthetic documents whose answer stands earlier in the text: training text of the bundled model, and later a task.

Each generator is a pure function of a `random.Random` and its arguments. Training and evaluation never meet: their
random streams are seeded by different strings (`training_rng`, `evaluation_rng`), and a quarter of the words is
reserved, by hash, to be asked for in evaluation only.
"""

import hashlib
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

_WORDS = """
acorn amber anchor apple arrow atlas autumn badge bamboo banjo barley basket beacon beaver bell berry birch blossom
boat bottle branch bread brick bridge bronze brush bucket butter button cabin cactus camel candle canoe canyon carbon
carpet castle cedar cellar chalk cherry cinder circus cliff clover cobalt comet copper coral cotton cradle crane crayon
crystal daisy dawn desert diamond dolphin donkey dragon drum eagle ember engine falcon feather fern fiddle finch flame
flint flute forest fossil fountain fox galaxy garden garlic ginger glacier glove gold goose granite grape gravel hammer
harbor hazel helmet heron hill honey horse igloo indigo iron island ivory jacket jade jasmine jungle kettle kite ladder
lagoon lantern laurel lemon leopard lilac lily linen lion lizard lobster lotus magnet mango maple marble meadow melon
mint mirror monkey moon moss mountain nectar needle nickel oak oasis ocean olive onion opal orange orchid otter owl
oyster paddle palm panda paper parrot peach pearl pebble pepper piano pigeon pillow pine planet plum pond poppy prairie
prism pumpkin quartz rabbit raven ribbon river robin rocket rose ruby saddle saffron salmon sand satin shadow shell
silk silver sparrow spider spruce stone storm summer sunset swan temple thistle thunder tiger timber tulip tunnel turtle
valley velvet violet violin walnut whale willow window winter wolf zebra
"""
WORDS: tuple[str, ...] = tuple(_WORDS.split())

# One spelling of a record per document, so that the key alone tells the records of a document apart.
RECORD_TEMPLATES = (": {key}: {value}\n", "- {key} {value}\n", "set {key} = {value}\n", "{{ {key} -> {value} }}\n")

# What a needle says, the value last but for punctuation: one among comments of code, and one that language models complete.
NEEDLES = {
    "note": "# note: the word for {key} is {value}\n",
    "number": "The special magic number for {key} is {value}.\n",
}

# A needle whose question shares no content word with it, after NoLiMa (arXiv 2502.05167): who lives in a city is asked for by
# the city's country.
RESIDENT, RESIDENT_ASKED = "{name} has lived in {city} since spring.\n", "The person whose home is in {country} is called"
CAPITALS = (
    *(("Vienna", "Austria"), ("Lisbon", "Portugal"), ("Oslo", "Norway"), ("Athens", "Greece"), ("Cairo", "Egypt")),
    *(("Warsaw", "Poland"), ("Helsinki", "Finland"), ("Dublin", "Ireland"), ("Madrid", "Spain"), ("Lima", "Peru")),
    *(("Tokyo", "Japan"), ("Nairobi", "Kenya"), ("Ottawa", "Canada"), ("Havana", "Cuba"), ("Berlin", "Germany")),
    *(("Brussels", "Belgium"), ("Budapest", "Hungary"), ("Stockholm", "Sweden"), ("Bangkok", "Thailand"), ("Rome", "Italy")),
)
NAMES = (
    *("Marta", "Paul", "Anna", "Jonas", "Clara", "Victor", "Emma", "Oscar", "Julia"),
    *("Simon", "Laura", "Martin", "Helen", "Peter", "Nina", "David", "Sarah", "Thomas"),
)


@dataclass(frozen=True)
class RetrievalExample:
    """A document that ends in a question and the answer that its text determines.

    Args:
        prompt: the document up to the last question; it ends right before the answer.
        answer: what follows `prompt`; it begins with a space where its first word would.
        kind: the generator's name.
        answer_spans: every answer's `(start, stop)` characters in `text`, the last one being `answer`.
    """

    prompt: str
    answer: str
    kind: str
    answer_spans: tuple[tuple[int, int], ...]

    @property
    def text(self) -> str:
        """Prompt and answer joined."""
        return self.prompt + self.answer


def training_rng(seed: int | str) -> random.Random:
    """The random stream of one training seed; no evaluation seed gives the same one."""
    return random.Random(f"training/{seed}")


def evaluation_rng(seed: int | str) -> random.Random:
    """The random stream of one evaluation seed; training never draws from it."""
    return random.Random(f"evaluation/{seed}")


def asked_words(split: str) -> tuple[str, ...]:
    """The words that documents of a split (`training` or `evaluation`) may ask for; the two splits share none."""
    if split not in ("training", "evaluation"):
        raise ValueError(f"expected the split 'training' or 'evaluation', got {split!r}")
    return tuple(word for word in WORDS if _is_reserved(word) == (split == "evaluation"))


def key_value_records(
    rng: random.Random, *, pairs: int, questions: int = 1, split: str = "evaluation", template: int = 0, filler: str = ""
) -> RetrievalExample:
    """`pairs` records in random order, then `questions` of them asked again; the value of the last is the answer.

    Only keys that `asked_words(split)` holds occur as keys, and no word is the value of two records. With a `filler` the records
    are lines at random places of it.
    """
    keys = _draw(rng, asked_words(split), pairs)
    values = _draw(rng, [word for word in WORDS if word not in set(keys)], pairs)
    value_of = dict(zip(keys, values, strict=True))
    records = [_record(template, key, value_of[key]) for key in keys]
    text = _hidden(filler, [(rng.random(), record) for record in records]) if filler else "".join(records)
    question_keys = [rng.choice(keys) for _ in range(questions)]
    return _with_questions(text, [(key, value_of[key]) for key in question_keys], template, "key_value_records")


def multi_hop_references(
    rng: random.Random, *, chains: int, hops: int = 2, questions: int = 1, split: str = "evaluation", template: int = 0
) -> RetrievalExample:
    """Shuffled records that form `chains` chains of `hops` records; a question names a chain's head, wants its end.

    The answer walks the chain: its text is each hop's word in turn, so every step can be looked up.
    """
    heads = _draw(rng, asked_words(split), chains)
    rest = _draw(rng, [word for word in WORDS if word not in set(heads)], chains * hops)
    paths = [[head, *rest[index * hops : (index + 1) * hops]] for index, head in enumerate(heads)]
    links = [(key, value) for path in paths for key, value in itertools.pairwise(path)]
    rng.shuffle(links)
    records = "".join(_record(template, key, value) for key, value in links)
    question_paths = [rng.choice(paths) for _ in range(questions)]
    pairs = [(path[0], " ".join(path[1:])) for path in question_paths]
    return _with_questions(records, pairs, template, "multi_hop_references")


def needle_in_filler(
    rng: random.Random,
    *,
    filler: str,
    depth: float,
    distractors: int = 0,
    split: str = "evaluation",
    wording: str = "note",
) -> RetrievalExample:
    """`filler` with one sentence hidden at `depth` (0 first line, 1 last line) and asked for at the end by its own beginning.

    `wording` is one of `NEEDLES`; values are words, or in `number` five digits. `distractors` sentences of the same form about
    other words are hidden at random depths. Raises `ValueError` when `depth` is outside 0 to 1.
    """
    _check_depth(depth)
    keys = _draw(rng, asked_words(split), 1 + distractors)
    if wording == "number":
        values = list(map(str, rng.sample(range(10_000, 100_000), 1 + distractors)))
    else:
        values = _draw(rng, [word for word in WORDS if word not in set(keys)], 1 + distractors)
    depths = [depth, *(rng.random() for _ in range(distractors))]
    sentences = [NEEDLES[wording].format(key=key, value=value) for key, value in zip(keys, values, strict=True)]
    prompt = _hidden(filler, list(zip(depths, sentences, strict=True))) + NEEDLES[wording].partition(" {value}")[0].format(
        key=keys[0]
    )
    return _example(prompt, f" {values[0]}", "needle_in_filler", ())


def resident_in_filler(rng: random.Random, *, filler: str, depth: float, distractors: int = 3) -> RetrievalExample:
    """`filler` with a sentence on who lives in a city hidden at `depth`; the person is asked for by the city's country.

    `distractors` sentences on other people in other cities are hidden at random depths. No name, city or country occurs in the
    filler. Raises `ValueError` when `depth` is outside 0 to 1, and where the filler leaves too few of them.
    """
    _check_depth(depth)
    names = _draw(rng, [name for name in NAMES if name not in filler], 1 + distractors)
    places = _draw(rng, [place for place in CAPITALS if not any(name in filler for name in place)], 1 + distractors)
    depths = [depth, *(rng.random() for _ in range(distractors))]
    sentences = [RESIDENT.format(name=name, city=city) for name, (city, _) in zip(names, places, strict=True)]
    prompt = _hidden(filler, list(zip(depths, sentences, strict=True))) + RESIDENT_ASKED.format(country=places[0][1])
    return _example(prompt, f" {names[0]}", "resident_in_filler", ())


def repeated_passage(rng: random.Random, *, passages: Sequence[str], repeats: int = 1) -> RetrievalExample:
    """All `passages` once, then `repeats` of them again word for word; the last repeat is the answer."""
    if not passages:
        raise ValueError("expected at least one passage to repeat, got none; cut the source text into passages first")
    text = "".join(passages)
    spans = []
    for _ in range(repeats):
        copy = rng.choice(passages)
        spans.append((len(text), len(text) + len(copy)))
        text += copy
    start, _ = spans[-1]
    return _example(text[:start], text[start:], "repeated_passage", tuple(spans[:-1]))


def passage_to_copy(rng: random.Random, *, filler: str, shots: int, lead: int, words: int) -> RetrievalExample:
    """The words of `filler`, then `shots` passages of them on lines of their own, then the first `lead` words of another one.

    A passage has `words` words; the answer is the rest of the last one. Raises `ValueError` where the filler is shorter than the
    passages.
    """
    text = filler.split()
    starts = _draw(rng, range(0, len(text) - words + 1, words), shots + 1)
    *shown, passage = (text[start : start + words] for start in starts)
    lines = [text, *shown, passage[:lead]]
    prompt = "\n".join(" ".join(line) for line in lines)
    return _example(prompt, " " + " ".join(passage[lead:]), "passage_to_copy", ())


def _check_depth(depth: float) -> None:
    if not 0.0 <= depth <= 1.0:
        raise ValueError(f"expected a depth from 0 (first line) to 1 (last line), got {depth}")


def _hidden(filler: str, sentences: Sequence[tuple[float, str]]) -> str:
    """`filler` with lines of their own at their depths, 0 before its first line and 1 behind its last."""
    lines = filler.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    places = [(round(depth * len(lines)), sentence) for depth, sentence in sentences]
    for line, sentence in sorted(places, reverse=True):
        lines.insert(line, sentence)
    return "".join(lines)


def _with_questions(records: str, pairs: list[tuple[str, str]], template: int, kind: str) -> RetrievalExample:
    text, spans = records + "\n", []
    for key, value in pairs:
        question = _record(template, key, value)
        start = len(text) + question.rindex(f" {value}")
        spans.append((start, start + 1 + len(value)))
        text += question
    start, stop = spans[-1]
    return _example(text[:start], text[start:stop], kind, tuple(spans[:-1]))


def _example(prompt: str, answer: str, kind: str, earlier_spans: tuple[tuple[int, int], ...]) -> RetrievalExample:
    span = (len(prompt), len(prompt) + len(answer))
    return RetrievalExample(prompt=prompt, answer=answer, kind=kind, answer_spans=(*earlier_spans, span))


def _record(template: int, key: str, value: str) -> str:
    return RECORD_TEMPLATES[template].format(key=key, value=value)


def _draw(rng: random.Random, words: Sequence[str], count: int) -> list[str]:
    if count > len(words):
        raise ValueError(f"expected at most {len(words)} different words or passages, got a request for {count}; ask for fewer")
    return rng.sample(list(words), count)


def _is_reserved(word: str) -> bool:
    return hashlib.sha256(word.encode()).digest()[0] % 4 == 0
