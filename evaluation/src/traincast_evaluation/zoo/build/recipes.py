"""Every built-in model: what is captured, at which size, in which variants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from traincast.ir.workload import DEFAULT_FRAMEWORK, STUDY_FRAMEWORK
from traincast.models.dlrm.config import DLRM_V2, STUDY_DLRMS, DlrmConfig
from traincast_evaluation.zoo.build.recommenders import RECOMMENDERS, Family
from traincast_evaluation.zoo.build.steps import (
    Inputs,
    Loss,
    MakeStep,
    Setting,
    make_cnn_study_step,
    make_dlrm_step,
    make_dlrm_v2_step,
    make_modern_step,
    make_recommender_step,
)
from traincast_evaluation.zoo.define import bert, dcn, gpt2, opt, sizes, switch, transformer, xlnet
from traincast_evaluation.zoo.define.dlrm import Dlrm
from traincast_evaluation.zoo.define.inception import InceptionV3
from traincast_evaluation.zoo.define.resnet import ResNet50
from traincast_evaluation.zoo.define.vgg import Vgg13

ATTENTIONS = ("eager", "sdpa")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How to capture one model. `axis` names what `choices` choose between; defaults come first.

    `without` lists (choice, optimizer) pairs that do not exist. A `data_parallel` model is the same on every rank.
    """

    name: str
    description: str
    batch_size: int
    make: Callable[[Setting], MakeStep]
    parameters: Callable[[], int]
    seq_len: int = 0
    axis: str = ""
    choices: tuple[str, ...] = ("plain",)
    optimizers: tuple[str, ...] = ("sgd", "adam", "adagrad")
    without: tuple[tuple[str, str], ...] = ()
    framework_version: str = DEFAULT_FRAMEWORK
    synchronised: bool = False
    data_parallel: bool = False

    def settings(self) -> list[Setting]:
        """Every variant, the default first."""
        settings = []
        for choice in self.choices:
            for precision in ("fp32", "half"):
                for optimizer in self.optimizers:
                    if (choice, optimizer) not in self.without:
                        settings.append(
                            Setting(mode="training", optimizer=optimizer, precision=precision, choice=choice)
                        )
                settings.append(Setting(mode="inference", optimizer="", precision=precision, choice=choice))
        return settings


def count_parameters(build: Callable[[], nn.Module]) -> int:
    """Parameters of a model, shared ones once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build().parameters())


def make_token_ids(count: int) -> Inputs:
    """`count` tensors of token ids [batch, length]."""
    return lambda batch, length: tuple(torch.zeros(batch, length, dtype=torch.int64) for _ in range(count))


def make_images(side: int, setting: Setting) -> Inputs:
    """Images [batch, 3, side, side]."""
    return lambda batch, _: (torch.zeros(batch, 3, side, side, dtype=setting.input_dtype),)


def make_classes(batch: int, _: int) -> tuple[torch.Tensor, ...]:
    """One class per sample."""
    return (torch.zeros(batch, dtype=torch.int64),)


def _make_language_model_recipe(
    *, name: str, description: str, batch_size: int, seq_len: int, build: Callable[[str], nn.Module], loss: Loss,
    inputs: int = 1, choices: tuple[str, ...] = ATTENTIONS,
) -> Recipe:  # fmt: skip
    def make(setting: Setting) -> MakeStep:
        return make_modern_step(setting, lambda: build(setting.choice), make_token_ids(inputs), loss, make_token_ids(1))

    return Recipe(
        name=name, description=description, batch_size=batch_size, seq_len=seq_len, make=make,
        parameters=lambda: count_parameters(lambda: build("eager")),
        axis="attention", choices=choices, optimizers=("adam", "sgd", "adagrad"), data_parallel=True,
    )  # fmt: skip


def _make_bert_recipe() -> Recipe:
    def make(setting: Setting) -> MakeStep:
        config = replace(sizes.BERT_LARGE, attention=setting.choice)
        head = bert.BertForPreTraining if setting.mode == "training" else bert.BertForSequenceClassification

        def labels(batch: int, length: int) -> tuple[torch.Tensor, ...]:
            return (*make_token_ids(1)(batch, length), *make_classes(batch, length))

        return make_modern_step(setting, lambda: head(config), make_token_ids(1), bert.compute_pretraining_loss, labels)

    return Recipe(
        name="bert-large",
        description="BERT-large: pre-training heads when training, classification head at inference",
        batch_size=8, seq_len=512, make=make,
        parameters=lambda: count_parameters(lambda: bert.BertForPreTraining(sizes.BERT_LARGE)),
        axis="attention", choices=ATTENTIONS, optimizers=("adam", "sgd", "adagrad"), data_parallel=True,
    )  # fmt: skip


def _make_gpt_recipe(name: str, description: str, config: sizes.LanguageModelSizes, *, batch_size: int) -> Recipe:
    return _make_language_model_recipe(
        name=name, description=description, batch_size=batch_size, seq_len=config.max_seq_len,
        build=lambda attention: gpt2.Gpt2(replace(config, attention=attention)), loss=gpt2.compute_causal_loss,
    )  # fmt: skip


def _make_dlrm_recipe(config: DlrmConfig, description: str) -> Recipe:
    def make(setting: Setting) -> MakeStep:
        chosen = config.replace_options(embedding=setting.choice, optimizer=setting.optimizer or config.optimizer)
        return make_dlrm_step(setting, Dlrm, chosen)

    return Recipe(
        name=config.name, description=description, batch_size=config.batch_size, make=make,
        parameters=lambda: config.parameters, axis="embedding", choices=("batched", "bag", "fbgemm"),
        optimizers=("sgd", "adagrad", "adam"), without=(("bag", "adam"),),
        framework_version=STUDY_FRAMEWORK, synchronised=True,
    )  # fmt: skip


def _make_dlrm_v2_recipe() -> Recipe:
    def make(setting: Setting) -> MakeStep:
        config = replace(DLRM_V2, optimizer=setting.optimizer or DLRM_V2.optimizer)
        return make_dlrm_v2_step(setting, dcn.DlrmDcn, config)

    return Recipe(
        name="dlrm-v2", description="MLPerf DLRM-DCNv2: 26 multi-hot tables, low-rank cross network",
        batch_size=DLRM_V2.batch_size, make=make, parameters=_count_dlrm_v2_parameters,
        axis="embedding", choices=("fbgemm",), optimizers=("sgd", "adagrad", "adam"),
    )  # fmt: skip


def _count_dlrm_v2_parameters() -> int:
    return count_parameters(lambda: dcn.DlrmDcn(replace(DLRM_V2, resident_rows=0)))


def _make_recommender_recipe(model: Family) -> Recipe:
    def make(setting: Setting) -> MakeStep:
        return make_recommender_step(setting, model.build, *model.batch(setting))

    return Recipe(
        name=model.name, description=model.description, batch_size=model.batch_size, seq_len=model.seq_len, make=make,
        parameters=model.parameters, optimizers=("adam", "sgd"),
    )  # fmt: skip


def _make_cnn_recipe(name: str, description: str, model: Callable[[], nn.Module], *, side: int, study: bool) -> Recipe:
    def make(setting: Setting) -> MakeStep:
        inputs = make_images(side, setting)
        if study:
            return make_cnn_study_step(setting, model, inputs, make_classes)
        return make_modern_step(setting, model, inputs, F.cross_entropy, make_classes)

    return Recipe(
        name=name, description=description, batch_size=32, make=make, parameters=lambda: count_parameters(model),
        framework_version=STUDY_FRAMEWORK if study else DEFAULT_FRAMEWORK, synchronised=study, data_parallel=True,
    )  # fmt: skip


_RECIPES = (
    _make_dlrm_recipe(
        STUDY_DLRMS["dlrm-default"], "DLRM of the single-GPU study: 8 tables of 1M rows, 100 lookups each"
    ),
    _make_dlrm_recipe(STUDY_DLRMS["dlrm-mlperf"], "MLPerf DLRM (Criteo Terabyte): 26 tables, one lookup each"),
    _make_dlrm_recipe(
        STUDY_DLRMS["dlrm-ddp"], "small DLRM of the data-parallel study: 8 tables of 80k rows, 10 lookups each"
    ),
    _make_dlrm_v2_recipe(),
    *(_make_recommender_recipe(model) for model in RECOMMENDERS),
    _make_bert_recipe(),
    _make_gpt_recipe("gpt2-large", "GPT-2 large with language model head", sizes.GPT2_LARGE, batch_size=4),
    _make_gpt_recipe("gpt3-xl", "GPT-3 XL as GPT-2: 24 layers of 3072", sizes.GPT3_XL, batch_size=2),
    _make_gpt_recipe("gpt3-2.7b", "GPT-3 2.7B as GPT-2: 32 layers of 2560", sizes.GPT3_27, batch_size=2),
    _make_language_model_recipe(
        name="opt-1.3b",
        description="OPT-1.3B with language model head",
        batch_size=2,
        seq_len=2048,
        build=lambda attention: opt.Opt(replace(sizes.OPT_13, attention=attention)),
        loss=gpt2.compute_causal_loss,
    ),
    _make_language_model_recipe(
        name="switch-xl4",
        description="Switch Transformer XL with 4 experts, every expert at its capacity of 64",
        batch_size=2,
        seq_len=512,
        build=lambda _: switch.Switch(sizes.SWITCH_XL4),
        loss=xlnet.compute_token_loss,
        inputs=2,
        choices=("eager",),
    ),
    _make_language_model_recipe(
        name="xlnet",
        description="XLNet base (xlnet-base-cased) with language model head",
        batch_size=8,
        seq_len=512,
        build=lambda _: xlnet.Xlnet(sizes.XLNET_BASE),
        loss=xlnet.compute_token_loss,
        choices=("eager",),
    ),
    _make_language_model_recipe(
        name="transformer",
        description="the original Transformer, base: 6 + 6 layers of 512",
        batch_size=32,
        seq_len=128,
        build=lambda attention: transformer.Transformer(replace(sizes.TRANSFORMER_BASE, attention=attention)),
        loss=transformer.compute_label_smoothed_loss,
        inputs=2,
    ),
    _make_cnn_recipe("resnet50", "ResNet-50 on 224 x 224 images", ResNet50, side=224, study=True),
    _make_cnn_recipe("inception-v3", "Inception-v3 on 299 x 299 images", InceptionV3, side=299, study=True),
    _make_cnn_recipe("vgg13", "VGG-13 on 224 x 224 images", Vgg13, side=224, study=False),
)
RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _RECIPES}
