"""Files with random contents that public scripts read: texts, tokens, interactions, pictures."""

from __future__ import annotations

import json
import random
import string
from functools import partial
from pathlib import Path

_WORDS = ("the", "of", "train", "step", "model", "data", "layer", "batch", "<unk>", "and", "in", "a", "to")


def make_file(kind: str, path: Path) -> None:
    """Writes a file or folder of that kind."""
    (path if kind in ("images", "coco", "tokenizer", "model") else path.parent).mkdir(parents=True, exist_ok=True)
    _MAKERS[kind](path, random.Random(29))


def _write_text(path: Path, draw: random.Random) -> None:
    lines = (" ".join(draw.choices(_WORDS, k=20)) for _ in range(3000))
    path.write_text("\n".join([string.printable, *lines]), encoding="utf-8")


def _write_tokens(path: Path, draw: random.Random) -> None:
    path.write_bytes(draw.randbytes(2 * 200_000).replace(b"\xff", b"\x00").replace(b"\xc4", b"\x00"))


def _write_interactions(path: Path, draw: random.Random) -> None:
    lines = (f"{user} {draw.randint(1, 3000)}" for user in range(1, 600) for _ in range(draw.randint(5, 60)))
    path.write_text("\n".join(lines), encoding="utf-8")


def _write_sequences(path: Path, draw: random.Random) -> None:
    rows = ["index,user_id,sequence_item_ids,sequence_ratings,sequence_timestamps,sex,age_group,occupation,zip_code"]
    for user in range(1, 600):
        count = draw.randint(20, 200)
        lists = (
            ",".join(str(draw.randint(1, 3900)) for _ in range(count)),
            ",".join(str(draw.randint(1, 5)) for _ in range(count)),
            ",".join(str(978300000 + 60 * place) for place in range(count)),
        )
        quoted = ",".join(f'"{text}"' for text in lists)
        rows.append(f"{user},{user},{quoted},0,1,2,3")
    path.write_text("\n".join(rows), encoding="utf-8")


def _write_films(path: Path, draw: random.Random) -> None:
    kinds = ("Drama", "Comedy", "Action|Drama", "Horror")
    rows = [f"{number},film {number},{draw.choice(kinds)},film,{draw.randint(1930, 2000)}" for number in range(1, 3953)]
    path.write_text("\n".join(["movie_id,title,genres,cleaned_title,year", *rows]), encoding="utf-8")


def _write_images(path: Path, draw: random.Random) -> None:
    from PIL import Image

    for label in ("bird", "cat", "cow", "dog", "fish", "horse"):
        (path / label).mkdir(exist_ok=True)
        for number in range(140):
            colour = (draw.randrange(256), draw.randrange(256), draw.randrange(256))
            Image.new("RGB", (256, 256), colour).save(path / label / f"{number}.jpg")


def _write_coco(path: Path, draw: random.Random) -> None:
    from PIL import Image

    (path / "annotations").mkdir(exist_ok=True)
    for part in ("train2017", "val2017"):
        (path / part).mkdir(exist_ok=True)
        images, boxes = [], []
        for number in range(1, 25):
            Image.new("RGB", (320, 240), (number, 0, 0)).save(path / part / f"{number}.jpg")
            images.append({"id": number, "file_name": f"{number}.jpg", "width": 320, "height": 240})
            for place in range(3):
                box = [draw.randrange(100), draw.randrange(100), 50 + 10 * place, 40]
                boxes.append({
                    "id": 10 * number + place, "image_id": number, "category_id": 1 + place, "bbox": box,
                    "area": box[2] * box[3], "iscrowd": 0, "segmentation": [],
                })  # fmt: skip
        known = [{"id": number, "name": str(number)} for number in range(1, 91)]
        text = json.dumps({"images": images, "annotations": boxes, "categories": known})
        (path / "annotations" / f"instances_{part}.json").write_text(text, encoding="utf-8")


def _write_tokenizer(path: Path, draw: random.Random) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_WORDS]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    }  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]", "eos": "[SEP]"}
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512}
    said |= {f"{name}_token": word for name, word in names.items()}
    (path / "tokenizer_config.json").write_text(json.dumps(said), encoding="utf-8")
    sizes = {"model_type": "gpt2", "n_layer": 2, "n_embd": 256, "n_head": 4, "vocab_size": 300}
    (path / "config.json").write_text(json.dumps(sizes), encoding="utf-8")


def _write_model(path: Path, draw: random.Random) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    _write_tokenizer(path, draw)
    LlamaForCausalLM(
        LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, vocab_size=300)
    ).save_pretrained(path)


def _write_records(path: Path, draw: random.Random, **columns: int) -> None:
    """Lines of JSON with a text of so many words in each column."""
    rows = ({name: " ".join(draw.choices(_WORDS, k=count)) for name, count in columns.items()} for _ in range(400))
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


_MAKERS = {
    "text": _write_text, "tokens": _write_tokens, "json": partial(_write_records, text=400),
    "interactions": _write_interactions, "sequences": _write_sequences, "images": _write_images, "coco": _write_coco,
    "tokenizer": _write_tokenizer, "films": _write_films, "model": _write_model,
    "prompts": partial(_write_records, prompt=12),
    "pairs": partial(_write_records, prompt=12, chosen=20, rejected=20),
}  # fmt: skip
