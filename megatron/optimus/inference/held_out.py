"""Tasks of lm-eval's harness made from texts that a model was not trained on.

- ``held_out_text``: bits per byte of each text;
- ``held_out_cloze``: the last word of a passage;
- ``held_out_choice``: how a passage goes on, where three of four continuations are those of other passages.

They are YAML files with JSON lines beside them, as the harness reads them. The same texts, sizes and seed give the same
files. Words are what stands between white space.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megatron.optimus.config.schema import SplitBy
from megatron.optimus.data.dataset import Split, range_of_split
from megatron.optimus.data.errors import DataError
from megatron.optimus.data.files import TokenFiles
from megatron.optimus.data.indexed import IndexedDataset
from megatron.optimus.data.inspection import document_offsets, split_of_files
from megatron.optimus.data.tokenize.tokenizer import Tokenizer
from megatron.optimus.platform.files import write_atomically

TASKS = ("held_out_text", "held_out_cloze", "held_out_choice")
NUM_EXAMPLES = 16  # passages that are examples (few-shot) and no questions
_NUM_CHOICES = 4
_TEXT_CHARACTERS = 8192  # longest text of bits per byte
_PASSAGES = 8  # of one document, so that a long one is not all there is


class Passage(NamedTuple):
    """Consecutive words of a document, with the white space between them.

    Attributes:
        document: its number.
        beginning: the first half.
        middle: the second half up to the last word.
        last: the last word. The white space before ``middle`` and ``last`` belongs to them.
    """

    document: int
    beginning: str
    middle: str
    last: str


def held_out_documents(
    prefix: str, tokenizer: Tokenizer, split: str, part: Split, split_by: SplitBy, seed: int
) -> Iterator[str]:
    """Yields the documents of a token file that lie in one split as a whole, in random order.

    Args:
        prefix: of the .bin/.idx pair.
        tokenizer: that made it.
        split: shares of training, validation and test, as in training.
        part: the split.
        split_by: as in training.
        seed: of the order.

    Raises:
        DataError: the file is damaged, or no whole document lies in the split.
    """
    files = TokenFiles([prefix], split=split)
    start, stop = range_of_split(files, 0, split, part, split_of_files(files, split_by))
    data = IndexedDataset(prefix)
    offsets = document_offsets(data)
    first, last = offsets.searchsorted(start), offsets.searchsorted(stop, side="right") - 1
    if first >= last:
        raise DataError(
            f"{prefix}: no whole document is in the {part.name.lower()} split ({split}), tokens {start} to {stop} of "
            f"{data.tokens_total}; give it a larger share, or name another --part"
        )
    numbers = list(range(first, last))
    random.Random(seed).shuffle(numbers)
    for number in numbers:
        ids = data.tokens[offsets[number] : offsets[number + 1]].tolist()
        yield tokenizer.decode([one for one in ids if one != tokenizer.eod_id])


def passages_of(document: int, text: str, num_words: int) -> list[Passage]:
    """Cuts a text into passages of ``num_words`` words each; what is left at the end is left out."""
    ends = [found.end() for found in re.finditer(r"\S+", text)]
    found = []
    for first in range(0, len(ends) - num_words + 1, num_words):
        start = 0 if first == 0 else ends[first - 1]
        half, before_last, end = (ends[first + count - 1] for count in (num_words // 2, num_words - 1, num_words))
        beginning = text[start:half].lstrip()
        found.append(Passage(document, beginning, text[half:before_last], text[before_last:end]))
    return found


def make_tasks(texts: Iterable[str], folder: Path, *, items: int, num_words: int, seed: int) -> dict[str, int]:
    """Writes the three tasks.

    Args:
        texts: documents; as many are read as are needed.
        folder: for the files; it is made where it is missing.
        items: questions of each task, if there are texts for so many.
        num_words: of a passage.
        seed: of the drawing.

    Returns:
        The number of questions of each task.

    Raises:
        DataError: fewer than four passages are left beside the examples, or they are all of one document's words.
        OSError: a file cannot be written.
    """
    documents, passages = [], list[Passage]()
    for number, text in enumerate(texts):
        documents.append(text[:_TEXT_CHARACTERS])
        passages += islice(passages_of(number, text, num_words), _PASSAGES)
        if len(documents) >= items and len(passages) >= items + NUM_EXAMPLES:
            break
    generator = random.Random(seed)
    generator.shuffle(passages)
    examples, questions = passages[:NUM_EXAMPLES], passages[NUM_EXAMPLES : NUM_EXAMPLES + items]
    if len(questions) < _NUM_CHOICES:
        raise DataError(
            f"{len(documents)} texts have {len(passages)} passages of {num_words} words; {NUM_EXAMPLES + _NUM_CHOICES} "
            "are needed at least: name a text with more, or a smaller --words"
        )
    lines: dict[str, list[list[dict[str, Any]]]] = {
        "held_out_text": [[{"text": text} for text in documents[:items] if text.strip()]],
        "held_out_cloze": [[_cloze(one) for one in part] for part in (questions, examples)],
        "held_out_choice": [[_choice(one, passages, generator) for one in part] for part in (questions, examples)],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for task, parts in lines.items():
        files = {}
        for name, part in zip(("test", "train"), parts, strict=False):
            path = folder.resolve() / f"{task}.{name}.jsonl"
            content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in part)
            write_atomically(path, content, sync=False)
            files[name] = str(path)
        write_atomically(folder / f"{task}.yaml", yaml.safe_dump(_definition(task, files), sort_keys=False), sync=False)
    return {task: len(parts[0]) for task, parts in lines.items()}


def _cloze(passage: Passage) -> dict[str, Any]:
    return {"context": passage.beginning + passage.middle, "target": passage.last}


def _choice(passage: Passage, passages: Sequence[Passage], generator: random.Random) -> dict[str, Any]:
    """The true continuation among three of other passages, of other documents where these are enough."""
    right = passage.middle + passage.last
    texts = {one.middle + one.last: one.document for one in passages}
    far = [text for text, document in texts.items() if document != passage.document and text != right]
    near = [text for text, document in texts.items() if document == passage.document and text != right]
    if len(far) + len(near) < _NUM_CHOICES - 1:
        raise DataError(f"the texts have {len(texts)} different continuations; {_NUM_CHOICES} are needed at least")
    wrong = generator.sample(far if len(far) >= _NUM_CHOICES - 1 else far + near, _NUM_CHOICES - 1)
    choices = [*wrong, right]
    generator.shuffle(choices)
    return {"context": passage.beginning, "choices": choices, "answer": choices.index(right)}


def _definition(task: str, files: dict[str, str]) -> dict[str, Any]:
    """The task's YAML file. Examples are drawn from those set aside, by the seed of the evaluation."""
    common = {"task": task, "dataset_path": "json", "dataset_kwargs": {"data_files": files}, "test_split": "test"}
    drawn = {"fewshot_split": "train", "target_delimiter": ""}
    own: dict[str, dict[str, Any]] = {
        "held_out_text": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "text",
            "num_fewshot": 0,
            "metric_list": [{"metric": "bits_per_byte"}, {"metric": "byte_perplexity"}],
        },
        "held_out_cloze": drawn
        | {
            "output_type": "loglikelihood",
            "doc_to_text": "context",
            "doc_to_target": "target",
            "metric_list": [{"metric": "acc"}, {"metric": "perplexity"}],
        },
        "held_out_choice": drawn
        | {
            "output_type": "multiple_choice",
            "doc_to_text": "context",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
    }
    return common | own[task] | {"metadata": {"version": 1.0}}
