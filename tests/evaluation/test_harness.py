"""lm-evaluation-harness with a method: what it measures is what the model says inside of `attach`."""

import json

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from tokenizers.processors import TemplateProcessing

from shadowattn import Method
from shadowattn.errors import InputError
from shadowattn.evaluation import harness
from shadowattn.models import load_bundled
from shadowattn.types import RetentionProfile

TASKS = {
    "choice": """
task: choice
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
metadata: {version: 1.5}
""",
    "answer": """
task: answer
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 4}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
metadata: {version: 2.0}
""",
    "text": """
task: text
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
metadata: {version: 1.0}
""",
}


def write_tasks(folder, questions: int = 4):
    """Three tasks of local files, whose prompts have unequal lengths."""
    words = ["def", "return", "import", "class", "self", "for", "while"]
    with open(folder / "questions.jsonl", "w") as file:
        for index in range(questions):
            question = " ".join(words[(index * place + place) % 7] for place in range(1, 14 + 9 * index))
            file.write(json.dumps({"question": question, "choices": ["def", "import"], "answer": index % 2}) + "\n")
    data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder / 'questions.jsonl'}}}}}\ntest_split: test\n"
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text.strip() + "\n" + data)
    return folder


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return write_tasks(tmp_path)


def evaluated(folder, method, names=tuple(TASKS), **options) -> tuple[dict, "harness.ShadowAttnLM"]:
    loaded = load_bundled()
    model = harness.ShadowAttnLM(loaded.model, tokenizer=loaded.tokenizer, method=method, **options)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return simple_evaluate(model, tasks=list(names), task_manager=manager, bootstrap_iters=0), model


def likelihood(loaded, text: str, continuation: str) -> float:
    """What the harness asks for, by a plain forward pass."""
    context = loaded.tokenizer.encode(text)
    whole = loaded.tokenizer.encode(f"{text} {continuation}")
    logits = loaded.model(torch.tensor([whole[:-1]])).logits[0].log_softmax(-1)
    rows = range(len(context) - 1, len(whole) - 1)
    return sum(float(logits[row, whole[row + 1]]) for row in rows)


@pytest.mark.filterwarnings("ignore")  # of the harness and what it imports
@pytest.mark.parametrize("method", [None, Method(1.0), Method(0.2, estimator="oracle"), Method(0.3, estimator="int8_fused")])
def test_likelihoods_are_those_of_a_plain_pass_inside_of_attach(tasks, method):
    results, model = evaluated(tasks, method)
    loaded = load_bundled()
    with torch.no_grad():
        for sample in results["samples"]["choice"]:
            asked = sample["doc"]
            got = [one[0] for one in sample["filtered_resps"]]
            if method is None:
                expected = [likelihood(loaded, asked["question"], choice) for choice in asked["choices"]]
            else:
                with method(loaded.model):
                    expected = [likelihood(loaded, asked["question"], choice) for choice in asked["choices"]]
            assert [float(one) for one in got] == pytest.approx(expected, abs=6e-6)
    assert results["versions"] == {"choice": 1.5, "answer": 2.0, "text": 1.0}
    if method is None:
        assert model.counters.density == 1
        assert not model.counters.sparse_rows
    elif method.retention < 1:
        assert model.counters.sparse_rows
        assert model.counters.density < method.retention + 0.1


@pytest.mark.filterwarnings("ignore")
def test_batches_run_one_by_one_and_give_the_same(tasks):
    alone, _ = evaluated(tasks, Method(0.3))
    with pytest.warns(UserWarning, match="prompts go one at a time"):
        together, _ = evaluated(tasks, Method(0.3), batch_size=4)
    assert together["results"] == alone["results"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", [None, Method(0.3)])
def test_questions_whose_prompts_are_cut_are_counted(tasks, method):
    """Those that do not fit with their answers; the last token of a choice is not read, and `text` is rolled over windows."""
    tokenizer, records = load_bundled().tokenizer, [json.loads(line) for line in open(tasks / "questions.jsonl")]  # noqa: SIM115
    prompts = [len(tokenizer.encode(one["question"])) for one in records]
    pairs = [max(len(tokenizer.encode(f"{one['question']} {choice}")) for choice in one["choices"]) for one in records]
    room = pairs[2] - 1  # the third question's choices just fit, the fourth's do not
    assert pairs == sorted(pairs)
    _, model = evaluated(tasks, method, max_length=room)
    lengths = {"choice": pairs, "answer": [tokens + 4 for tokens in prompts], "text": prompts}
    assert model.tokens == {(task, index): tokens for task in lengths for index, tokens in enumerate(lengths[task])}
    assert model.cut == {("choice", 3), *(("answer", index) for index in range(4) if prompts[index] + 4 > room)}
    assert ("answer", 0) not in model.cut


@pytest.fixture
def putting_bos(tasks):
    """A model whose tokenizer puts a BOS, and what it is asked to compute."""
    loaded = load_bundled()
    bos = loaded.tokenizer.bos_token
    template = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, loaded.tokenizer.bos_token_id)])
    loaded.tokenizer._tokenizer.post_processor = template
    model, prompts = harness.ShadowAttnLM(loaded.model, tokenizer=loaded.tokenizer, method=None), []
    loaded.model.register_forward_pre_hook(
        lambda _, args, kwargs: prompts.append((args or [kwargs["input_ids"]])[0]), with_kwargs=True
    )

    def ask(*names: str) -> list[torch.Tensor]:
        manager = TaskManager(include_path=str(tasks), include_defaults=False)
        simple_evaluate(model, tasks=list(names), task_manager=manager, bootstrap_iters=0)
        return prompts

    return ask, bos


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", ["choice", "answer", "text"])
def test_every_prompt_begins_with_one_bos(putting_bos, task):
    ask, _ = putting_bos
    bos = load_bundled().tokenizer.bos_token_id
    whole = [prompt[0].tolist() for prompt in ask(task) if prompt.shape[1] > 1]  # generation goes on token by token
    assert len(whole) >= 4
    assert all(prompt[0] == bos != prompt[1] for prompt in whole)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", ["choice", "answer", "text"])
def test_a_doubled_bos_is_refused(putting_bos, tasks, task):
    ask, bos = putting_bos
    text = (tasks / "questions.jsonl").read_text()
    (tasks / "questions.jsonl").write_text(text.replace('"question": "', f'"question": "{bos}{bos}'))
    with pytest.raises(InputError, match="at most one BOS token at its start, got two"):
        ask(task)


@pytest.mark.filterwarnings("ignore")
def test_nothing_is_cut_where_all_fits(tasks):
    _, model = evaluated(tasks, None)
    assert not model.cut


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", ["choice", "answer"])
def test_a_cut_is_refused_where_that_is_asked(tasks, task):
    with pytest.raises(InputError, match=f"{task}: expected prompts of at most the context of 32 tokens, got "):
        evaluated(tasks, None, names=[task], max_length=32, allow_cut=False)


@pytest.mark.filterwarnings("ignore")
def test_a_padded_batch_is_never_computed():
    loaded = load_bundled()
    model = harness.ShadowAttnLM(loaded.model, tokenizer=loaded.tokenizer, method=Method(0.3))
    with pytest.raises(RuntimeError, match="one prompt at a time, got 2"):
        model._model_call(torch.ones(2, 5, dtype=torch.int64))


@pytest.mark.filterwarnings("ignore")
def test_options_of_a_command_line_make_a_method(tmp_path):
    from lm_eval.api.registry import get_model

    from shadowattn.offline import save_profile
    from tests.profiles import profile_for

    assert get_model("shadowattn") is harness.ShadowAttnLM
    loaded = load_bundled()
    how = {"tokenizer": loaded.tokenizer}
    assert harness.ShadowAttnLM(loaded.model, method=None, **how).attach is None
    for options in ({}, {"estimator": "oracle"}):
        with pytest.raises(InputError, match=r"model_args: expected a retention, .* got none; dense attention is"):
            harness.ShadowAttnLM(loaded.model, **options, **how)
    model = harness.ShadowAttnLM(loaded.model, retention=0.2, estimator="oracle", query_block=16, **how)
    assert model.attach == Method(0.2, estimator="oracle", query_block=16)
    profile = profile_for(loaded.model, 0.4)
    save_profile(profile, tmp_path / "profile.json")
    kept = harness.ShadowAttnLM(loaded.model, retention=str(tmp_path / "profile.json"), **how).attach.retention
    assert isinstance(kept, RetentionProfile)
    assert kept.retention == profile.retention
    with pytest.raises(InputError, match=r"got retentoin"):
        harness.ShadowAttnLM(loaded.model, retentoin=0.2, **how)
    with pytest.raises(InputError, match="got both: retention"):
        harness.ShadowAttnLM(loaded.model, method=Method(0.2), retention=0.3, **how)
    with pytest.raises(InputError, match="retention"):
        harness.ShadowAttnLM(loaded.model, retention=3, **how)


def test_the_command_refuses_in_one_line(monkeypatch, capsys):
    def refused():
        raise InputError("model_args: expected others")

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", refused)
    assert harness.main() == 2
    assert capsys.readouterr().err == "error: model_args: expected others\n"
