from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_spd.errors import ConfigError
from megatron_spd.quickstart.corpus import make_corpus, opening_of, standard_library

LINE = "value = compute(1, 2, 3)  # a line of forty letters\n"


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Made-up sources: ten modules, a test, a package of a site and an unreadable file."""
    for index in range(10):
        (tmp_path / f"module{index}.py").write_text(f"# module {index}\n" + LINE * 60)
    for folder in ("test", "site-packages/other", "package"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "inner.py").write_text(f"# {folder}\n" + LINE * 60)
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n" * 900)
    (tmp_path / "short.py").write_text("pass\n")
    return tmp_path


def test_documents_are_whole_files_and_prompts_are_held_out(library: Path) -> None:
    corpus = make_corpus(library, num_bytes=10**6, num_held_out=3, num_openings=5, seed=0)
    assert len(corpus.documents) == 8  # ten modules and the package, without three held out
    assert all(text.endswith(LINE) and text.startswith("# ") for text in corpus.documents)
    assert not any("test" in text or "site-packages" in text for text in corpus.documents)
    assert len(corpus.held_out) == 3
    assert not any(text.startswith(opening) for opening in corpus.held_out
                   for text in corpus.documents)  # fmt: skip
    assert len(corpus.openings) == 5
    assert all(opening in "".join(corpus.documents) for opening in corpus.openings)


def test_sample_depends_on_the_seed_and_on_nothing_else(library: Path) -> None:
    def made(seed: int) -> object:
        return make_corpus(library, num_bytes=9000, num_held_out=2, num_openings=4, seed=seed)

    assert made(3) == made(3)
    assert made(3) != made(4)


def test_bytes_bound_the_documents(library: Path) -> None:
    corpus = make_corpus(library, num_bytes=5000, num_held_out=1, num_openings=1, seed=0)
    assert len(corpus.documents) == 2


def test_opening_ends_behind_a_line() -> None:
    opening = opening_of(LINE * 10)
    assert opening == LINE * (len(opening) // len(LINE))
    assert 200 <= len(opening) <= 320
    assert opening_of("x" * 1000) == ""
    assert opening_of("short\n") == ""


def test_too_few_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="4 to hold out and at least one"):
        make_corpus(tmp_path, num_bytes=1000, num_held_out=4, num_openings=1, seed=0)


def test_files_have_the_forms_that_train_and_eval_read(library: Path, tmp_path: Path) -> None:
    corpus = make_corpus(library, num_bytes=9000, num_held_out=2, num_openings=4, seed=0)
    corpus.write(tmp_path / "text")
    read = {
        name: [json.loads(line) for line in (tmp_path / "text" / name).open()]
        for name in ("train.jsonl", "openings.jsonl", "prompts.jsonl")
    }
    assert [record["text"] for record in read["train.jsonl"]] == list(corpus.documents)
    assert [record["turns"] for record in read["prompts.jsonl"]] == [[t] for t in corpus.held_out]
    assert [record["question_id"] for record in read["openings.jsonl"]] == [0, 1, 2, 3]


def test_this_interpreter_has_sources() -> None:
    corpus = make_corpus(
        standard_library(), num_bytes=200_000, num_held_out=2, num_openings=8, seed=0
    )
    assert sum(map(len, corpus.documents)) >= 200_000 * 0.9
    assert len(corpus.openings) == 8
