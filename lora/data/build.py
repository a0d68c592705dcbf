"""From files to a Dataset: every row is read, checked, masked and cut before any weights load, and none is lost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from mlxinfer.errors import InvalidRequestError
from mlxinfer.lora.data.files import Record, read_records, split_files
from mlxinfer.lora.data.formats import Row, RowError, parse_row
from mlxinfer.lora.data.hub import hub_records, is_dataset_id
from mlxinfer.lora.data.masks import Masker
from mlxinfer.lora.data.options import DataOptions, Dataset, Dropped, Kind
from mlxinfer.lora.types import Example, Judged, Pair

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mlxinfer.lora.data.masks import Masked
    from mlxinfer.tokenizer import Tokenizer

MAX_NAMED = 20
"""Bad rows that one message names."""


def read_examples(
    sources: str | Path | Sequence[str | Path],
    tokenizer: Tokenizer,
    options: DataOptions | None = None,
    *,
    split: str = "train",
) -> Dataset:
    """Read files, folders (the files of `split` in them) and data sets of the hub ("owner/name", "owner/name:config").

    Raises InvalidRequestError that names file and line: for rows that cannot be used (unless `bad_rows` drops them),
    for rows whose losses differ, where a row is too long and `overlong` is "error", and where nothing is left.
    """
    sources = [sources] if isinstance(sources, str | Path) else list(sources)
    builder = _Builder(tokenizer, options or DataOptions())
    for record in _records(sources, split):
        builder.add(record)
    return builder.finish(", ".join(map(str, sources)))


def _records(sources: Sequence[str | Path], split: str) -> Iterator[Record]:
    for source in sources:
        path = Path(source)
        if _is_folder(path):
            files = split_files(path, split)
            if not files:
                raise InvalidRequestError(
                    f"{path} has no file of the split {split!r}, such as {split}.jsonl; its files: "
                    f"{', '.join(sorted(p.name for p in path.iterdir())[:8]) or 'none'}",
                    param="data",
                )
            for file in files:
                yield from read_records(file)
        elif isinstance(source, str) and is_dataset_id(source):
            yield from hub_records(source, split)
        else:
            yield from read_records(path)


def _is_folder(path: Path) -> bool:
    """Raises InvalidRequestError for a name that no file can have."""
    try:
        return path.is_dir()
    except OSError as error:
        name = f"{path!s:.160}"
        raise InvalidRequestError(f"{name}: cannot be read: {error.strerror}", param="data") from error


class _Builder:
    """Adds rows up; what is wrong is collected, so that one message names several rows."""

    def __init__(self, tokenizer: Tokenizer, options: DataOptions) -> None:
        self._options = options
        self._masker = Masker(tokenizer, options.supervise, options.template_kwargs)
        style = options.completion_style
        self._as_chat = tokenizer.has_chat_template if style == "auto" else style == "chat"
        self._items: list[Example | Pair | Judged] = []
        self._dropped: list[Dropped] = []
        self._problems: list[str] = []
        self._formats: Counter[str] = Counter()
        self._ids: dict[int, int] = {}
        self._kind: tuple[Kind, str] | None = None
        self._rows = self._truncated = self._lost_reasoning = 0

    def add(self, record: Record) -> None:
        self._rows += 1
        if record.value is None:
            self._refuse(record.where, record.problem or "the row is empty", drop=record.blank)
            return
        try:
            row = parse_row(record.value, as_chat=self._as_chat)
        except RowError as error:
            self._refuse(record.where, str(error))
            return
        if self._kind is None:
            self._kind = row.kind, record.where
        elif self._kind[0] != row.kind:
            raise InvalidRequestError(
                f"{record.where}: this is a {row.kind} row and {self._kind[1]} is a {self._kind[0]} one; rows of "
                "different losses cannot be trained together, so put them into different files",
                param="data",
            )
        if row.kind != "sft" and self._options.supervise != "assistant":
            raise InvalidRequestError(
                f"{record.where}: supervise is {self._options.supervise!r}, and of a {row.kind} row the last answer is "
                "what is learnt; leave supervise out",
                param="supervise",
            )
        try:
            self._build(row, record.where)
        except (RowError, InvalidRequestError) as error:
            self._refuse(record.where, str(error))

    def finish(self, sources: str) -> Dataset:
        if self._problems:
            more = len(self._problems) - MAX_NAMED
            lines = "\n".join(self._problems[:MAX_NAMED]) + (f"\n… and {more:,} more" if more > 0 else "")
            raise InvalidRequestError(
                f"{len(self._problems):,} of {self._rows:,} rows cannot be trained on (bad_rows = drop leaves them "
                f"out):\n{lines}",
                param="data",
            )
        if not self._items:
            reasons = "; ".join(f"{d.where}: {d.reason}" for d in self._dropped[:3])
            raise InvalidRequestError(
                f"{sources}: " + (f"no row is left to train on ({reasons})" if self._rows else "the file is empty"),
                param="data",
            )
        assert self._kind is not None
        assert len(self._items) + len(self._dropped) == self._rows
        return Dataset(
            kind=self._kind[0],
            items=tuple(self._items),
            rows=self._rows,
            truncated=self._truncated,
            dropped=tuple(self._dropped),
            formats=self._formats,
            lost_reasoning=self._lost_reasoning,
        )

    def _refuse(self, where: str, reason: str, *, drop: bool = False) -> None:
        if drop or self._options.bad_rows == "drop":
            self._dropped.append(Dropped(where, reason))
        else:
            self._problems.append(f"{where}: {reason}")

    def _build(self, row: Row, where: str) -> None:
        pair = row.kind == "preference"
        first = self._masker.mask(row.first, last_only=row.kind != "sft")
        sides = [first]
        if row.second is not None:
            sides.append(self._masker.mask(row.second, last_only=True))
            _check_prompts(*sides)
        if any(not any(side.supervised) for side in sides):
            raise RowError("nothing in the row is learnt: the part that would be has no tokens")
        longest = max(len(side.token_ids) for side in sides)
        limit = self._options.max_tokens
        if longest > limit and self._options.overlong != "cut":
            message = f"the row has {longest:,} tokens; at most {limit:,}"
            if self._options.overlong == "error":
                raise RowError(f"{message} (raise max_tokens, or set overlong to cut or drop)")
            self._note(row, first)
            self._dropped.append(Dropped(where, message))
            return
        if any(not any(side.supervised[:limit]) for side in sides):
            self._note(row, first)
            self._dropped.append(
                Dropped(where, f"the row has {longest:,} tokens, and what is learnt stands after the first {limit:,}")
            )
            return
        if pair and sides[0].token_ids[:limit] == sides[1].token_ids[:limit]:
            raise RowError(f"the chosen and the rejected answer are the same in the first {limit:,} tokens")
        examples = [self._example(side, where) for side in sides]
        self._note(row, first)
        self._truncated += any(example.truncated for example in examples)
        if pair:
            self._items.append(Pair(*examples))
        elif row.wanted is not None:
            self._items.append(Judged(examples[0], row.wanted))
        else:
            self._items.append(examples[0])

    def _example(self, masked: Masked, where: str) -> Example:
        limit = self._options.max_tokens
        # One int object for each id: millions of tokens then take 16 bytes each, not 48.
        ids = tuple(self._ids.setdefault(i, i) for i in masked.token_ids[:limit])
        return Example(ids, tuple(masked.supervised[:limit]), where, len(masked.token_ids) > limit)

    def _note(self, row: Row, masked: Masked) -> None:
        self._formats[row.format] += 1
        self._lost_reasoning += masked.lost_reasoning


def _check_prompts(chosen: Masked, rejected: Masked) -> None:
    """Both begin with the same prompt tokens, up to the first learnt one."""
    begin = chosen.supervised.index(True) if any(chosen.supervised) else 0
    if chosen.token_ids[:begin] != rejected.token_ids[:begin] or any(rejected.supervised[:begin]):
        raise RowError("'chosen' and 'rejected' do not answer the same prompt")
