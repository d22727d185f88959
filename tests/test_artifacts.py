import json

import pytest

from shadowattn.artifacts import Stage, Units, content_hash, write_json
from shadowattn.errors import InputError


def test_the_hash_is_of_the_content_not_of_the_order():
    assert content_hash({"a": 1, "b": [2, 3]}) == content_hash({"b": [2, 3], "a": 1})
    assert content_hash({"a": 1}) != content_hash({"a": 2})


def test_a_unit_is_computed_once(tmp_path):
    calls = []
    for _ in range(2):
        assert Units(tmp_path).get("L0_H1", lambda: calls.append(1) or 7) == 7
    assert len(calls) == 1
    assert Units(tmp_path).has("L0_H1")
    assert not Units(tmp_path).has("L0_H2")


def test_a_unit_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError):
        Units(tmp_path).get("unit", lambda: 1 / 0)
    assert not list(tmp_path.iterdir())


def test_a_unit_that_was_cut_short_is_refused(tmp_path):
    Units(tmp_path).get("unit", lambda: [1, 2, 3])
    (tmp_path / "unit.json").write_text("[1, 2")
    with pytest.raises(InputError, match="rebuild with: rm"):
        Units(tmp_path).get("unit", lambda: None)


def test_a_failed_write_keeps_the_old_content(tmp_path):
    path = tmp_path / "value.json"
    write_json(path, 1)
    with pytest.raises(TypeError):
        write_json(path, object())
    assert json.loads(path.read_text()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["value.json"]


def finished(tmp_path) -> Stage:
    stage = Stage(tmp_path, "stage", {"seed": 1, "shape": (2, 3)})
    stage.finish({"answer": 42})
    return stage


def test_a_finished_stage_is_found_by_its_inputs(tmp_path):
    finished(tmp_path)
    again = Stage(tmp_path, "stage", {"seed": 1, "shape": (2, 3)})
    assert again.done
    assert again.read() == {"answer": 42}
    assert not Stage(tmp_path, "stage", {"seed": 2, "shape": (2, 3)}).done


@pytest.mark.parametrize("damage", ["altered", "missing", "manifest cut short", "other version", "other inputs"])
def test_a_damaged_stage_is_refused_with_what_rebuilds_it(tmp_path, damage):
    stage = finished(tmp_path)
    result, manifest = stage.folder / "result.json", stage.folder / "manifest.json"
    content = json.loads(manifest.read_text())
    if damage == "altered":
        result.write_text('{"answer": 43}')
    elif damage == "missing":
        result.unlink()
    elif damage == "manifest cut short":
        manifest.write_text(manifest.read_text()[:30])
    elif damage == "other version":
        manifest.write_text(json.dumps(content | {"schema_version": 0}))
    else:
        manifest.write_text(json.dumps(content | {"inputs": {"seed": 9}}))
    with pytest.raises(InputError, match=r"rebuild with: rm -r"):
        stage.read()


def test_results_and_units_of_other_code_count_for_nothing(tmp_path):
    """As after an edit: nothing of the first code is read by the second, and nothing of it is left when that is done."""
    first = Stage(tmp_path, "stage", {"seed": 1}, code="before")
    first.units.put("unit", "old")
    first.finish("old")
    second = Stage(tmp_path, "stage", {"seed": 1}, code="after")
    assert second.folder == first.folder
    assert second.outdated
    assert not second.done
    assert not second.units.has("unit")
    second.units.put("unit", "new")
    second.finish("new")
    assert second.read() == "new"
    assert Stage(tmp_path, "stage", {"seed": 1}, code="after").done
    assert [path.name for path in second.folder.glob("units*")] == ["units-after"]
