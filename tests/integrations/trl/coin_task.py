"""A task that scripts and recipes share; light, since every verifying process imports it."""

import zlib

TEXTS = ["a1,2>", "b3,4,5>", "c6>", "d7,8,9,1>"]


def prompts():
    return [{"id": f"p{index}", "prompt": text, "answer": ""} for index, text in enumerate(TEXTS)]


def right(prompt_id, response):
    """True for about a quarter of all texts, whoever writes them."""
    return zlib.crc32(f"{prompt_id} {response}".encode()) % 4 == 0


def verify(prompt, response, finish_reason):
    return right(prompt.id, response)


def reward(completions, id, **_):
    """`verify` as a reward function of a script."""
    return [float(right(i, text)) for i, text in zip(id, completions, strict=True)]
