import random
import re

import pytest

from shadowattn.data.retrieval import CAPITALS, NAMES, RESIDENT, RESIDENT_ASKED, resident_in_filler
from shadowattn.errors import InputError
from shadowattn.evaluation.tasks import Needle
from tests.evaluation.tasks.chat import Chatty

FUNCTION_WORDS = {"has", "in", "is", "since", "the", "whose"}


def test_question_and_hidden_sentence_share_no_content_word():
    for city, country in CAPITALS:
        said, asked = (
            set(re.findall(r"\w+", line.format(name="", city=city, country=country).lower()))
            for line in (RESIDENT, RESIDENT_ASKED)
        )
        assert not (said & asked) - FUNCTION_WORDS
        assert city[:4].lower() != country[:4].lower()
    cities, countries = zip(*CAPITALS, strict=True)
    assert len({*cities, *countries, *NAMES}) == 2 * len(CAPITALS) + len(NAMES)


@pytest.mark.parametrize("chat", [False, True])
def test_the_person_in_the_country_asked_for_is_hidden_once_among_others(chat, bundled, heldout):
    tokenizer, country_of = Chatty(bundled.tokenizer), dict(CAPITALS)
    task = Needle(documents=5, tokens=700, wording="country", chat=chat)
    for question in task.questions(tokenizer, heldout):
        prompt, answer = tokenizer.decode(question.prompt), tokenizer.decode(question.answer)
        hidden = re.findall(r"^(?:<user>)?(\w+) has lived in (\w+) since spring\.$", prompt, re.MULTILINE)
        asked = re.search(r"The person whose home is in (\w+) is called$", prompt)[1]
        assert len(hidden) == len({name for name, _ in hidden}) == 4
        assert [name for name, city in hidden if country_of[city] == asked] == [answer.strip()]
        assert prompt.count(asked) == prompt.count(answer.strip()) == 1
        assert question.tokens <= 700
        if chat:
            assert "Complete a sentence by a name from the text above.</user>\n<assistant>The person" in prompt


def test_people_and_places_of_the_text_are_not_used():
    taken = " ".join([*NAMES[:-1], *(country for _, country in CAPITALS[1:])])
    example = resident_in_filler(random.Random(0), filler=taken, depth=0.5, distractors=0)
    assert example.answer == f" {NAMES[-1]}"
    assert example.prompt.endswith(RESIDENT_ASKED.format(country=CAPITALS[0][1]))


def test_refuses_what_it_cannot_hide(bundled, heldout):
    with pytest.raises(ValueError, match="expected a depth from 0"):
        resident_in_filler(random.Random(0), filler="", depth=2.0)
    with pytest.raises(InputError, match=r"task\.tokens: expected more than 288, got 200; a needle needs a haystack"):
        Needle(tokens=200, wording="country")
