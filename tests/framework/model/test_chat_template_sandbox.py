"""Templates as hostile programs: what they cannot reach, and what ends them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from chats import MakeTokenizer, refusal, user
from tokenyard.errors import ModelLoadError, TokenyardError
from tokenyard.model.files import resolve_model
from tokenyard.model.tokenizer import load_tokenizer

ESCAPES = [
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ ''['__class__'] }}{{ []['__class__']['__mro__'] }}",
    "{{ messages.__class__ }}{{ messages[0].get.__self__ }}",
    "{{ namespace.__init__.__globals__ }}{{ namespace(__class__=1) }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ dict.__subclasses__() }}{{ dict.mro() }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{{ [1] | map(attribute='__class__') | list }}",
    "{{ [''] | map('attr', '__class__') | list }}",
    "{{ [messages] | sum(attribute='0.__class__', start='') }}",
    "{{ range.__class__ }}{{ strftime_now.__code__ }}",
    "{% import 'os' as os %}{{ os }}",
    "{% include '/etc/passwd' %}",
    "{% extends '/etc/passwd' %}",
    "{{ messages.clear() }}{{ messages[0].update({'a': 1}) }}",
    "{% set x = messages[0].__setitem__ %}{{ x('role', 1) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ messages.append(1) }}",
    "{{ ('%s' | attr('__class__')) }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ lipsum.__globals__['os'] }}",
]
BOMBS = [
    "{% set ns = namespace(n=9) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "{{ ('x' * 4000000) | replace('x', 'y' * 8000000) }}",
    "{{ (['x' * 1000000] * 1000) | join }}",
    "{{ ('x' * 4000000).replace('x', 'y' * 4000) }}",
    "{{ ('x\n' * 3000000) | indent(999999) }}",
    "{{ (('x' * 8000000) | list) | sort | length }}",
    "{{ lipsum(n=100000) | length }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    "{{ " + "not " * 100_000 + "1 }}",
    "{{ 1" + " + 1" * 50_000 + " }}",
    "{% " * 100_000,
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% set s = 'ab' * 5000 %}{% for a in s %}{% for b in s %}{% for c in s %}{% endfor %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "{{ 'x' * 10000000000 }}",
    "{{ 'x' ** 3 }}{{ 9 ** 9 ** 9 ** 9 }}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
    "{{ 'x'.ljust(10000000000) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' % (10000000000, 1) }}",
    "{{ '{:{w}}'.format(1, w=10000000000) }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ 'x' | center(10000000000) }}",
    "{{ 'x\nx' | indent(10000000000) }}",
    "{% for x in [1] recursive %}{{ loop([1]) }}{{ loop([1]) }}{% endfor %}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_b10_a_template_cannot_reach_python(with_template: MakeTokenizer, template: str) -> None:
    tokenizer = with_template(template)
    try:
        rendered = tokenizer.render_chat(user("hi"))
    except TokenyardError:
        return
    for sign in ("class", "uid", "root:", "Template", "function", "Environment"):
        assert sign not in rendered


@pytest.mark.slow
@pytest.mark.parametrize("template", BOMBS, ids=lambda template: template[:40])
def test_b10_a_template_cannot_run_or_grow_without_end(with_template: MakeTokenizer, template: str) -> None:
    tokenizer = with_template(template)
    start = time.monotonic()
    refusal(tokenizer.render_chat, user("hi"))
    assert time.monotonic() - start < 10


def test_b10_compiling_is_under_the_deadline_too(with_template: MakeTokenizer) -> None:
    folded = "{{ [" + "'x' * 9, " * 100_000 + "] | length }}"
    refusal(with_template(folded).render_chat, user("hi"))


def test_b10_a_template_file_of_absurd_size_is_refused(with_template: MakeTokenizer) -> None:
    with pytest.raises(ModelLoadError, match="no chat template needs"):
        with_template("x" * (2**20 + 1))


def test_b10_a_chat_too_long_for_the_template_is_refused(with_template: MakeTokenizer) -> None:
    tokenizer = with_template("{{ messages[0].content }}")
    assert len(tokenizer.render_chat(user("x" * 2**20))) == 2**20
    refusal(tokenizer.render_chat, user("ü" * 9_000_000))


def test_b10_the_template_of_a_gguf_file_runs_in_the_sandbox_too(make_gguf: Callable[..., Path]) -> None:
    hostile = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    path = make_gguf(edit=lambda writer: writer.kv_data[0].update(_template(hostile)))
    tokenizer = load_tokenizer(resolve_model(str(path)))
    assert "unsafe" in str(refusal(tokenizer.render_chat, user("hi")))


def _template(text: str) -> dict[str, gguf.GGUFValue]:
    return {"tokenizer.chat_template": gguf.GGUFValue(text, gguf.GGUFValueType.STRING)}


def test_b10_the_process_imports_no_part_of_the_engine() -> None:
    heavy = ("torch", "numpy", "transformers", "tokenizers", "msgspec", "pluggy", "hydra")
    code = (
        "import sys, tokenyard.model.template_process\n"
        f"print([name for name in sys.modules if name.partition('.')[0] in {heavy!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
