"""Chat templates written like those of three families, and tokenizers trained on the spot that use them."""

from functools import cache
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A system turn of its own where the caller has none, and thoughts before the last answer only.
QWEN = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful model.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
LLAMA3 = (
    "<|bos|>{% if messages[0].role == 'system' %}{% set said = messages[0].content | trim %}"
    "{% set rest = messages[1:] %}{% else %}{% set said = '' %}{% set rest = messages %}{% endif %}"
    "<|head|>system<|/head|>\n\nThe date is 26 July.\n\n{{ said }}<|eot|>"
    "{% for m in rest %}<|head|>{{ 'ipython' if m.role == 'tool' else m.role }}<|/head|>\n\n"
    "{{ m.content | tojson if m.role == 'tool' else m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "qwen": QWEN, "llama3": LLAMA3}
SPECIAL = [
    *("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>"),
    *("<start_of_turn>", "<end_of_turn>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"),
    *("<think>", "</think>"),
]
# What contents are made of; each is told from the others by its number.
SENTENCES = [
    "The user asked the assistant about the system",
    "assistant user system model tool",
    "What does INST mean to a model?",
    "(A river) runs, slowly: to the sea!",
    "user\n\nassistant\nsystem",
    "Keep 42 lanterns; 7 ropes.",
    "think: the end of turn",
]


@cache
def backend(kind: str) -> str:
    """A tokenizer trained on the spot, of `words` or `bytes`, as JSON."""
    markup = [
        "\n\nThe",
        "user\nThe",
        "assistant\n\n",
        "model\nKeep",
        "system\nWhat",
        "INST SYS ipython date 26 July",
    ]
    texts = [
        *SENTENCES,
        *(f"{i}. [/INST] {text} [INST] <<SYS>>\n" for i, text in enumerate(SENTENCES)),
        *markup,
    ]
    texts += [f"{i} {j}." for i in range(10) for j in range(10)] * 2
    if kind == "words":
        tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|[^\w\s]|\s"), "isolated")
        trainer: Any = trainers.WordLevelTrainer(vocab_size=1000, special_tokens=["<unk>", *SPECIAL])
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=420, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        )
    tokenizer.train_from_iterator(texts * 3, trainer)
    return tokenizer.to_str()


@cache
def chat_tokenizer(template: str, kind: str) -> PreTrainedTokenizerFast:
    tokens = {"additional_special_tokens": SPECIAL[2:14], "bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    unknown = {"unk_token": "<unk>"} if kind == "words" else {}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(backend(kind)), pad_token="<|eos|>", **tokens, **unknown
    )
    tokenizer.chat_template = TEMPLATES.get(template, template)
    return tokenizer
