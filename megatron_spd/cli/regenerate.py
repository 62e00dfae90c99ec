"""`megatron-spd regenerate`: text that the target writes itself, to train a module on.

A module learns to foresee its target, so the best text to learn from is the target's own. The file
grows by whole batches; batch b's noise is a function of the seed and b alone. So a run that was
stopped goes on where the last whole batch ends, and gives the file a single run gives.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_spd.checkpoint.atomic import write_atomic
from megatron_spd.checkpoint.hf_generate import load_model, write_batch
from megatron_spd.cli.progress import Advance, progress
from megatron_spd.cli.prompts import read_prompts
from megatron_spd.cli.target import Target, open_target
from megatron_spd.config import PlanConfig, RegenerateOptions
from megatron_spd.errors import ConfigError
from megatron_spd.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True)
class RegenerateSummary:
    """What a run came to."""

    path: Path
    """The file."""
    texts: int
    """Texts in the file."""
    written: int
    """Texts of this process; 0 when the file was finished before."""
    tokens: int
    """Tokens this process wrote, prompts not counted."""
    seconds: float
    """Of writing; loading the target is not counted."""

    def __str__(self) -> str:
        if not self.written:
            return f"{self.path} already holds its {self.texts} texts; left as it is"
        speed = self.tokens / max(self.seconds, 1e-9)
        return (
            f"{self.path}: {self.texts} texts, {self.written} of them written now, "
            f"{self.tokens} tokens in {self.seconds:.1f} s ({speed:.0f} tokens/s)"
        )


@dataclass(frozen=True, kw_only=True)
class PromptIds:
    """A prompt and its token ids, beginning-of-text token included."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """What of an earlier run's file stays."""

    texts: int = 0
    num_bytes: int = 0


def regenerate(plan_config: PlanConfig, options: RegenerateOptions) -> RegenerateSummary:
    """Check everything that needs no weights, then write what the file still lacks.

    The plan is checked against the target, but one process runs the whole target: one that does
    not fit a single device would need several ranks, which this command does not start.

    Raises:
        ConfigError, PlanError, CheckpointError: the input cannot work, or `output` was begun with
            other options.
    """
    target = open_target(plan_config)
    sampling = SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )
    prompts = prompt_ids(target, options)
    total = options.num_texts or len(prompts)
    output = Path(options.output)
    kept = _begin(output, _record(target, options, total), total, options.batch_size)
    if kept.texts == total:
        return RegenerateSummary(path=output, texts=total, written=0, tokens=0, seconds=0.0)
    model = load_model(target.folder.path)
    started = time.perf_counter()
    with output.open("ab") as file, progress("regenerate", total) as advance:
        meter = _Meter(advance, kept.texts)
        for first in range(kept.texts, total, options.batch_size):
            asked = [
                prompts[text % len(prompts)]
                for text in range(first, min(first + options.batch_size, total))
            ]
            texts = write_batch(
                model,
                [prompt.ids for prompt in asked],
                limits=[_limit(target, options, len(prompt.ids)) for prompt in asked],
                eos_ids=frozenset(target.folder.spec.eos_ids),
                sampling=sampling,
                number=first // options.batch_size,
                on_token=meter.counter(first),
            )
            # a stop between two writes of one batch is what `_begin` cleans up
            file.write(b"".join(_line(target, *pair) for pair in zip(asked, texts, strict=True)))
            file.flush()
    return RegenerateSummary(
        path=output,
        texts=total,
        written=total - kept.texts,
        tokens=meter.tokens,
        seconds=time.perf_counter() - started,
    )


def prompt_ids(target: Target, options: RegenerateOptions) -> list[PromptIds]:
    """The prompts as token ids; without a prompt file, the beginning-of-text token alone.

    Raises:
        ConfigError: the target has no such token, the number of texts is open, a prompt leaves
            no room in the context or has no token, or the prompt file cannot be read.
    """
    spec = target.folder.spec
    if not options.prompts:
        if not options.num_texts:
            raise ConfigError(
                "regenerate.prompts is empty and regenerate.num_texts is 0, so there is nothing "
                "to write; name a prompt file or set num_texts to at least 1"
            )
        if spec.bos_id is None:
            raise ConfigError(
                f"regenerate.prompts is empty, but the target {target.folder.path} has no "
                "bos_token_id to start a text with; name a prompt file"
            )
        return [PromptIds(text="", ids=(spec.bos_id,))]
    found: list[PromptIds] = []
    for prompt in read_prompts(options.prompts):
        ids = tuple(target.tokenizer.encode(prompt.text))
        if not ids or len(ids) >= spec.max_positions:
            raise ConfigError(
                f"regenerate.prompts: question_id {prompt.question_id} of {options.prompts} has "
                f"{len(ids)} tokens, expected 1 to {spec.max_positions - 1}: the target's context "
                f"holds {spec.max_positions} and one must be left to write"
            )
        found.append(PromptIds(text=prompt.text, ids=ids))
    return found


class _Meter:
    """Turns rounds of a batch into texts done and tokens a second."""

    def __init__(self, advance: Advance, done: int) -> None:
        self._advance, self._started = advance, time.perf_counter()
        self.tokens = 0
        advance(done)

    def counter(self, done: int) -> Callable[[int, int], None]:
        """The callback of a batch that starts behind `done` texts."""

        def count(finished: int, tokens: int) -> None:
            self.tokens += tokens
            speed = self.tokens / (time.perf_counter() - self._started)
            self._advance(done + finished, f"{speed:.0f} tokens/s")

        return count


def _limit(target: Target, options: RegenerateOptions, length: int) -> int:
    return min(length + options.max_new_tokens, target.folder.spec.max_positions)


def _line(target: Target, prompt: PromptIds, ids: Sequence[int]) -> bytes:
    """One text of the file. ASCII escapes keep every reader's idea of a line end away from it."""
    text, head = target.tokenizer.decode(ids), target.tokenizer.decode(prompt.ids)
    if text.startswith(head):
        # a tokenizer may not give the prompt back letter for letter; the user's words stay
        text = prompt.text + text[len(head) :]
    return (json.dumps({"prompt": prompt.text, "text": text, "ids": list(ids)}) + "\n").encode()


def _record(target: Target, options: RegenerateOptions, total: int) -> dict[str, Any]:
    """Whatever decides the bytes of the file."""
    content = Path(options.prompts).read_bytes() if options.prompts else b""
    return {
        "num_texts": total,
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "seed": options.seed,
        "batch_size": options.batch_size,
        "prompts hash": hashlib.sha256(content).hexdigest()[:16] if options.prompts else "",
        "target weights hash": target.folder.weights_hash(),
        "tokenizer hash": target.folder.tokenizer_hash(),
    }


def _begin(output: Path, record: dict[str, Any], total: int, batch_size: int) -> _Kept:
    """Leave `output` with whole batches of this very run, and its record beside it."""
    beside = output.with_name(output.name + ".run.json")
    if output.is_dir():
        raise ConfigError(f"regenerate.output: {output} is a folder; name a file")
    if not output.exists() or not output.stat().st_size:
        write_atomic(beside, (json.dumps(record, indent=1) + "\n").encode())
        return _Kept()
    _check_record(output, beside, record)
    kept = _whole_batches(output, total, batch_size)
    if kept.num_bytes < output.stat().st_size:
        with output.open("r+b") as file:
            file.truncate(kept.num_bytes)
    return kept


def _check_record(output: Path, beside: Path, record: dict[str, Any]) -> None:
    try:
        begun = json.loads(beside.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"regenerate.output: {output} exists, but not the {beside.name} of the run that began "
            "it; name another file"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{beside} is not JSON: {error}; name another output") from error
    for name, value in record.items():
        before = begun.get(name) if isinstance(begun, dict) else begun
        if before != value:
            raise ConfigError(
                f"{output} was begun with {name} {before!r}, this run has {value!r}; "
                "give the same or name another output"
            )


def _whole_batches(output: Path, total: int, batch_size: int) -> _Kept:
    """How many texts stand in whole batches of whole lines, and where they end."""
    kept, texts, num_bytes = _Kept(), 0, 0
    with output.open("rb") as file:
        for line in file:
            if texts == total or not _is_whole(line):
                break
            texts, num_bytes = texts + 1, num_bytes + len(line)
            if texts % batch_size == 0 or texts == total:
                kept = _Kept(texts=texts, num_bytes=num_bytes)
    return kept


def _is_whole(line: bytes) -> bool:
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return line.endswith(b"\n") and isinstance(record, dict) and "ids" in record
