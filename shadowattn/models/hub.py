"""The Hugging Face hub and its local cache: whether a model is there, answered within seconds."""

import json

from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import DisabledRepoError, HTTPError, RepositoryNotFoundError, RevisionNotFoundError

_TIMEOUT_S = 5.0


def is_cached(id: str, revision: str | None) -> bool:
    """Whether the local cache holds config, tokenizer and all safetensors of a model at `revision` (None: the main branch)."""
    weights = _cached(id, "model.safetensors", revision)
    if weights is None and (index := _cached(id, "model.safetensors.index.json", revision)):
        with open(index) as file:
            shards = set(json.load(file)["weight_map"].values())
        weights = all(_cached(id, shard, revision) for shard in shards)
    tokenizer = any(_cached(id, file, revision) for file in ("tokenizer.json", "tokenizer.model", "vocab.json"))
    return bool(weights and tokenizer and all(_cached(id, file, revision) for file in ("config.json", "tokenizer_config.json")))


def _cached(id: str, file: str, revision: str | None) -> str | None:
    path = try_to_load_from_cache(id, file, revision=revision)
    return path if isinstance(path, str) else None  # else unknown, or known to be missing


def check_reached(id: str, revision: str | None) -> None:
    """Raises `ConnectionError` with the reason where the hub does not answer for a model within five seconds.

    One request, not repeated. Refusals (an unknown id, a licence to accept) are answers, and loading the model reports them.
    """
    if constants.HF_HUB_OFFLINE:
        raise ConnectionError("HF_HUB_OFFLINE is set")
    try:
        HfApi().model_info(id, revision=revision, timeout=_TIMEOUT_S)
    except (RepositoryNotFoundError, RevisionNotFoundError, DisabledRepoError):
        return
    except (HTTPError, OSError) as error:
        raise ConnectionError(" ".join(f"{type(error).__name__}: {error}".split())[:200]) from error
