"""A reranker and a sentiment classifier that mean something: MiniLM's weights, fine-tuned for seconds.

`python tests/small_heads.py MINILM FOLDER` writes FOLDER/reranker and FOLDER/sentiment. Seed, order and threads are
fixed. `small_heads` does it once per version of this file and keeps the result beside the fetched models.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

TRAINED = ("layer.4.", "layer.5.", "pooler", "classifier")

# each question is answered by the sentence beside it and by no other
ANSWERS = {
    "Which river flows through Cairo?": "Cairo lies on the banks of the Nile.",
    "Who invented the telephone?": "The first patent for a telephone went to Alexander Graham Bell in 1876.",
    "How tall is Mount Fuji?": "Mount Fuji rises 3776 metres above the sea.",
    "How long is the Great Wall of China?": "All parts of the Great Wall of China together are 21196 kilometres long.",
    "Why is the sky blue?": "Air scatters short blue waves of sunlight more than long red ones.",
    "How is cheese made?": "Milk curdles with rennet, and the curd is pressed and left to ripen.",
    "When did the Berlin Wall fall?": "Crowds opened the border in Berlin on 9 November 1989.",
    "What does a compiler do?": "A compiler translates the source code of a program into machine code.",
    "How do fish breathe?": "Gills take up the oxygen that is dissolved in water.",
    "Who composed The Magic Flute?": "Mozart finished his opera The Magic Flute in the year of his death.",
    "How far away is the moon?": "On average the moon is 384400 kilometres from the earth.",
    "What currency is used in Japan?": "People in Japan pay with yen.",
    "How do I undo a commit in git?": "Run git revert to make a new commit that takes the old one back.",
    "What is the largest animal?": "No animal is larger than the blue whale, which grows to 30 metres.",
    "How can I fall asleep faster?": "A dark, cool room and no screens before bed help people to sleep.",
    "What are the symptoms of the flu?": "Influenza comes with fever, a cough, headache and aching muscles.",
}
PRAISE = (
    "we loved every bit of it",
    "a lovely evening with great music",
    "the soup tasted wonderful",
    "kind and helpful people at the desk",
    "this is the best phone that i ever had",
    "so happy that i bought two",
    "works like a charm",
    "beautiful and well made",
    "i would gladly come back",
    "fast delivery, superb quality",
    "what a funny and clever film",
    "a real pleasure from start to end",
)
BLAME = (
    "we hated every bit of it",
    "a dreadful evening with bad music",
    "the soup tasted horrible",
    "unfriendly and useless people at the desk",
    "this is the worst phone that i ever had",
    "so angry that i sent it back",
    "stopped working at once",
    "ugly and badly made",
    "i will never come back",
    "late delivery, miserable quality",
    "what a boring and stupid film",
    "a real torture from start to end",
)


class SmallHeads(NamedTuple):
    """Checkpoint folders."""

    reranker: Path  # one label: how well a text answers a question
    sentiment: Path  # two labels: negative, positive


def small_heads(minilm: Path) -> SmallHeads:
    """Both checkpoints, made from `minilm` where they are missing; they appear whole or not at all."""
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
    folder = minilm.parent / f"small-heads-{version}"
    if not folder.is_dir():
        scratch = Path(tempfile.mkdtemp(dir=minilm.parent, prefix=".small-heads-"))
        try:
            subprocess.run([sys.executable, __file__, str(minilm), str(scratch)], check=True, capture_output=True)
            _publish(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return SmallHeads(folder / "reranker", folder / "sentiment")


def _publish(scratch: Path, folder: Path) -> None:
    try:
        os.rename(scratch, folder)
    except OSError:  # somebody else was faster
        if not folder.is_dir():
            raise


class Lesson(NamedTuple):
    """One step of training: texts, or pairs of them, and what the model should say."""

    first: list[str]
    second: list[str] | None
    wanted: torch.Tensor


def relevance_lessons(steps: int) -> Iterator[Lesson]:
    """Every question with its answer, and with the answer to another question, at each step a different one."""
    questions, answers = list(ANSWERS), list(ANSWERS.values())
    wanted = torch.tensor([1.0] * len(answers) + [0.0] * len(answers))
    for step in range(steps):
        shift = 1 + step % (len(answers) - 1)
        yield Lesson(questions * 2, answers + answers[shift:] + answers[:shift], wanted)


def sentiment_lessons(steps: int) -> Iterator[Lesson]:
    """All praise and all blame, over and over."""
    wanted = torch.tensor([1] * len(PRAISE) + [0] * len(BLAME))
    yield from [Lesson([*PRAISE, *BLAME], None, wanted)] * steps


def train(minilm: str, folder: str, lessons: Iterator[Lesson], **config: Any) -> None:
    """Train head, pooler and the last two layers, and save the checkpoint."""
    import transformers

    torch.manual_seed(7)
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(minilm, **config).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = any(part in name for part in TRAINED)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=3e-4)
    for lesson in lessons:
        logits = model(**tokenizer(lesson.first, lesson.second, padding=True, return_tensors="pt")).logits
        loss_of(logits, lesson.wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def loss_of(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Binary cross entropy for one label, cross entropy for several."""
    if logits.shape[1] == 1:
        return torch.nn.functional.binary_cross_entropy_with_logits(logits[:, 0], wanted)
    return torch.nn.functional.cross_entropy(logits, wanted)


def main(minilm: str, folder: str) -> None:
    """Make both."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    train(minilm, f"{folder}/reranker", relevance_lessons(40), num_labels=1)
    labels = {"id2label": {0: "negative", 1: "positive"}, "label2id": {"negative": 0, "positive": 1}}
    train(minilm, f"{folder}/sentiment", sentiment_lessons(25), **labels)


if __name__ == "__main__":
    main(*sys.argv[1:])
