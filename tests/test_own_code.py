"""Code of the user's own is found in the working directory, and what is wrong with it is said in one line."""

import re
import sys

import pytest

from graftrl.errors import ConfigError
from graftrl.methods import build_method
from graftrl.own_code import import_named

METHOD = """
from graftrl.methods.grpo import GRPO, GRPOSettings


class Settings(GRPOSettings):
    strength: float = 1.0


class Own(GRPO):
    settings_type = Settings


class WithoutOrder:
    settings_type, fewest_models, exchange = Settings, 1, None


class OtherSettings(GRPO):
    settings_type = dict


class NoParts(GRPO):
    settings_type = Settings

    def __init__(self, settings):
        self.settings = settings
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a module of a name that no other test has into the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    written = []

    def write(text, name=f"own_code_{tmp_path.name}"):
        (tmp_path / f"{name}.py").write_text(text)
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)


def test_the_working_directory_is_importable_and_names_may_be_nested(write):
    module = write("class A:\n    b = 3\n")
    assert import_named(f"{module}:A.b") == 3


def test_an_absent_module_is_told_where_it_is_looked_for(write, tmp_path):
    write("")
    with pytest.raises(ConfigError, match=rf"No module named 'no_such_module'; .*\({re.escape(str(tmp_path))}\)"):
        import_named("no_such_module:A")


def test_a_fault_in_the_users_module_is_told_with_its_line(write, tmp_path):
    module = write("import numpy\n\nx = undefined\n")
    with pytest.raises(ConfigError, match=r"NameError: name 'undefined' is not defined \(.*\.py, line 3\)$") as error:
        import_named(f"{module}:A")
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=r"AttributeError: .*no attribute 'B'"):
        import_named(f"{write('A = 1', 'own_code_other')}:B")
    with pytest.raises(ConfigError, match="SyntaxError"):
        import_named(f"{write('A =', 'own_code_torn')}:A")


def test_a_method_of_ones_own_takes_its_options_and_refuses_others(write):
    module = write(METHOD)
    method = build_method({"name": f"{module}:Own", "strength": 2})
    assert method.settings.strength == 2.0 and method.settings.name == f"{module}:Own"
    with pytest.raises(ValueError, match="stength"):
        build_method({"name": f"{module}:Own", "stength": 2})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("WithoutOrder", r"lacks order, objective"),
        ("OtherSettings", r"settings_type of '.*:OtherSettings' must be a subclass of graftrl.settings.Settings"),
        ("NoParts", r"an instance of '.*:NoParts' lacks filter, sampling_rounds"),
        ("Absent", r"^method: cannot import '.*:Absent'"),
    ],
)
def test_what_is_no_method_is_refused(name, message, write):
    with pytest.raises(ConfigError, match=message):
        build_method(f"{write(METHOD)}:{name}")
