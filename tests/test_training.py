"""The bundled model's training: resumable, seeded, fed with documents whose answers stand where they say."""

import dataclasses
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer

import experiments.train_reference_model  # noqa: F401 - stores the schema
from experiments.reference_model.abilities import Samples, repeated_block_losses
from experiments.reference_model.card import training_command
from experiments.reference_model.checkpoint import load_checkpoint, replacing, save_checkpoint
from experiments.reference_model.corpus import Mixture, draw_batch
from experiments.reference_model.export import export_model
from experiments.reference_model.fast_forward import FastForward
from experiments.reference_model.optimizer import orthogonalise
from experiments.reference_model.settings import ModelSize, Stage, Training
from experiments.reference_model.structured_init import initialise
from experiments.reference_model.trainer import Trainer, build_model
from shadowattn.data import retrieval
from shadowattn.data.stdlib import stdlib_files

_LENGTH = 64


@pytest.fixture(scope="module")
def files() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in stdlib_files("train")[:12]]


def _settings(folder: Path, **changes) -> Training:
    return Training(
        model=ModelSize(hidden_size=64, intermediate_size=64, num_hidden_layers=3, vocab_size=1024, max_position_embeddings=128),
        stages=[Stage(until=0.5, lengths=[_LENGTH // 2]), Stage(until=1.0, lengths=[_LENGTH])],
        tokens=6 * 2 * _LENGTH,
        batch_tokens=2 * _LENGTH,
        compile=False,
        device="cpu",
        output_dir=str(folder),
        **changes,
    )


@pytest.fixture(scope="module")
def trained(files, tmp_path_factory) -> Trainer:
    trainer = Trainer(_settings(tmp_path_factory.mktemp("uninterrupted")), files)
    assert trainer.train()
    return trainer


def test_a_resumed_run_equals_an_uninterrupted_one(files, trained, tmp_path):
    assert not Trainer(_settings(tmp_path, stop_after_steps=2), files).train()
    resumed = Trainer(_settings(tmp_path), files)
    assert resumed.step == 2
    assert resumed.train()
    assert resumed.tokens_seen == trained.tokens_seen
    expected = trained.model.state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in resumed.model.state_dict().items())


def test_an_interrupted_save_leaves_the_old_checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    save_checkpoint(folder, weights={"a": torch.ones(1)}, optimizer={"b": torch.ones(1)}, progress={"step": 1})
    with pytest.raises(KeyboardInterrupt), replacing(folder):
        raise KeyboardInterrupt
    assert load_checkpoint(folder)[2] == {"step": 1}
    # The moment between the two renames, when only the previous folder has its full name.
    folder.rename(tmp_path / "checkpoint.previous")
    assert load_checkpoint(folder)[2] == {"step": 1}


def test_the_exported_folder_loads_and_its_card_names_the_corpus(trained, tmp_path):
    tiny = Samples(repeat_rows=2, block_tokens=16, text_rows=2, text_tokens=128, key_value_documents=1, key_value_pairs=4)
    export_model(trained, tmp_path / "bundled", samples=dataclasses.replace(tiny, needle_documents=1, needle_tokens=96))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "bundled")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "bundled")
    assert model.dtype == torch.bfloat16
    text = "def main(argument):\n    return argument\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.model_max_length == 128
    assert None not in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    card = (tmp_path / "bundled" / "README.md").read_text()
    assert trained.corpus.sha256 in card
    assert str(tmp_path) not in card
    assert (tmp_path / "bundled" / "loss_curve.png").exists()


def test_the_card_gives_the_settings_that_differ_and_none_that_are_local(tmp_path):
    settings = Training(seed=3, mixture=Mixture(needle=0.1), output_dir=str(tmp_path), threads=2)
    assert training_command(settings) == "python -m experiments.train_reference_model mixture.needle=0.1 seed=3"


def test_the_fast_forward_equals_the_model():
    model = build_model(ModelSize(num_hidden_layers=3))
    initialise(model, seed=0)
    ids = torch.randint(1, 2560, (2, 33), generator=torch.Generator().manual_seed(0))
    logits = model(input_ids=ids[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    losses = FastForward(model, compiled=False)(ids[:, :-1], ids[:, 1:])
    torch.testing.assert_close(losses, expected.flatten(), atol=0.05, rtol=0.01)


def test_the_structured_initialisation_looks_back_and_copies_before_any_training():
    model = build_model(ModelSize(num_hidden_layers=3))
    initialise(model, seed=0)
    first, second = repeated_block_losses(model, 2560, Samples(repeat_rows=2, block_tokens=64))
    assert sum(second) < 0.8 * sum(first)
    model.set_attn_implementation("eager")
    ids = torch.randint(1, 2560, (1, 64), generator=torch.Generator().manual_seed(0))
    weights = model(input_ids=ids, output_attentions=True).attentions[0][0]
    for head in (0, 1):
        assert weights[head].diagonal(-head - 1).min() > 0.9


def test_a_model_too_small_for_the_circuit_is_refused():
    with pytest.raises(ValueError, match="expected at least 3 layers"):
        initialise(build_model(ModelSize(num_hidden_layers=2)), seed=0)


@pytest.mark.parametrize("shape", [(2, 32, 64), (1, 96, 32)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape):
    values = torch.linalg.svdvals(orthogonalise(torch.randn(shape, generator=torch.Generator().manual_seed(0))))
    assert values.min() > 0.3
    assert values.max() < 1.4


@pytest.mark.parametrize("kind", ["random_repeats", "text_repeats", "key_value", "needle", "multi_hop"])
def test_batches_are_a_function_of_seed_and_step_and_weigh_the_predictable(kind, trained):
    only = Mixture(**{field.name: float(field.name == kind) for field in dataclasses.fields(Mixture)})
    options = {"seed": 0, "progress": 0.2, "rows": 3, "length": 96, "mixture": only}
    batch, again = (draw_batch(trained.corpus, step=4, **options) for _ in range(2))
    assert torch.equal(batch.ids, again.ids)
    assert not torch.equal(batch.ids, draw_batch(trained.corpus, step=5, **options).ids)
    assert batch.ids.shape == (3, 97)
    assert batch.weights.shape == (3, 96)
    assert batch.weights.max() >= 1.0


_DOCUMENTS = {
    "key_value_records": lambda rng, split: retrieval.key_value_records(rng, pairs=20, questions=5, split=split, template=2),
    "multi_hop_references": lambda rng, split: retrieval.multi_hop_references(rng, chains=6, questions=3, split=split),
    "needle_in_filler": lambda rng, split: retrieval.needle_in_filler(
        rng, filler="x = 1\n" * 20, depth=0.5, distractors=2, split=split
    ),
    "repeated_passage": lambda rng, split: retrieval.repeated_passage(rng, passages=["a b\n", "c d\n"], repeats=3),
}


@pytest.mark.parametrize("kind", _DOCUMENTS)
def test_documents_are_deterministic_and_their_answers_are_where_they_say(kind):
    make = _DOCUMENTS[kind]
    example = make(retrieval.evaluation_rng(7), "evaluation")
    assert example == make(retrieval.evaluation_rng(7), "evaluation")
    assert example.kind == kind
    assert example.text[slice(*example.answer_spans[-1])] == example.answer
    assert example.answer_spans == tuple(sorted(example.answer_spans))
    for start, stop in example.answer_spans:
        for word in example.text[start:stop].split():
            assert word in example.text[:start], "the answer stands nowhere before its question"


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_needle_stands_at_its_depth(depth):
    filler = "".join(f"line {index}\n" for index in range(10))
    example = retrieval.needle_in_filler(retrieval.evaluation_rng(0), filler=filler, depth=depth)
    assert example.prompt.splitlines().index(f"{example.prompt.splitlines()[-1]}{example.answer}") == depth * 10


def test_training_and_evaluation_share_no_asked_word_and_no_random_stream():
    assert not set(retrieval.asked_words("training")) & set(retrieval.asked_words("evaluation"))
    assert retrieval.training_rng(0).random() != retrieval.evaluation_rng(0).random()
    for seed in range(20):
        example = retrieval.key_value_records(retrieval.training_rng(seed), pairs=30, questions=30, split="training")
        keys = {line.split()[1].strip(":") for line in example.text.splitlines() if line}
        assert keys <= set(retrieval.asked_words("training"))


def test_impossible_documents_are_refused():
    rng = retrieval.evaluation_rng(0)
    with pytest.raises(ValueError, match="expected at most"):
        retrieval.key_value_records(rng, pairs=500)
    with pytest.raises(ValueError, match="expected a depth"):
        retrieval.needle_in_filler(rng, filler="x\n", depth=2.0)
    with pytest.raises(ValueError, match="expected at least one passage"):
        retrieval.repeated_passage(rng, passages=[])
    with pytest.raises(ValueError, match="expected the split"):
        retrieval.asked_words("test")


def test_the_configuration_composes():
    with initialize_config_dir(str(Path(__file__).parents[1] / "conf"), version_base="1.3"):
        config = compose("train_reference_model", overrides=["mixture.needle=0.1"])
    assert OmegaConf.to_object(config).mixture.needle == 0.1


@pytest.mark.parametrize("structured", [False, True])
def test_initial_weights_are_those_of_the_seed(files, structured, tmp_path):
    def weights(seed: int, folder: str) -> torch.Tensor:
        settings = _settings(tmp_path / folder, seed=seed, structured_init=structured)
        return Trainer(settings, files).model.model.embed_tokens.weight

    first = weights(0, "first")
    torch.rand(3)  # whatever was drawn before changes nothing
    assert torch.equal(first, weights(0, "again"))
    assert not torch.equal(first, weights(1, "other"))
