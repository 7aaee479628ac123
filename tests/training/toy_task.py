"""A task that untrained models solve now and then: the first character is a digit of the prompt's parity."""

import time
import zlib


def prompts():
    for number in range(24):
        family = "abcdefghijkl"[number % 12]
        answer = str(number % 2)
        yield {
            "id": f"p{number}",
            "prompt": f"{family}{number % 10},1>",
            "answer": answer,
            "metadata": {"solution": f"{answer},5;6", "family": family},
        }


def slow_prompts():
    time.sleep(0.2)
    return prompts()


def one_long_prompt():
    yield from prompts()
    yield {"id": "long", "prompt": "a" + "1," * 60 + "1>", "answer": "0"}


def nothing():
    return []


def verify(prompt, response, finish_reason):
    return response[:1].isdigit() and int(response[0]) % 2 == int(prompt.reference)


def never(prompt, response, finish_reason):
    return False


def half(prompt, response, finish_reason):
    return 0.5


def coin(prompt, response, finish_reason):
    """Right for about a quarter of all texts, whoever writes them: many groups fail while others' are mixed."""
    return zlib.crc32(f"{prompt.id} {response}".encode()) % 4 == 0
