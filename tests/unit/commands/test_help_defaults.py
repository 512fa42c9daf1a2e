"""Help takes defaults from the code: a default that is changed in one place is not told wrongly in another."""

import importlib
import pkgutil
import re

import megatron_coca.commands
from megatron_coca.commands.evaluate import parser as evaluate_parser
from tests.command_parsers import parsers


def test_no_default_is_typed_by_hand() -> None:
    names = [each.name for each in pkgutil.iter_modules(megatron_coca.commands.__path__)]
    modules = [importlib.import_module(f"megatron_coca.commands.{name}") for name in names]
    commands = [module.parser() for module in modules if hasattr(module, "parser")] + [evaluate_parser()]
    told, typed = 0, []
    for parser in (each for command in commands for each in parsers(command)):
        for action in parser._actions:
            found = re.search(r"default:? ([^\s;),]+)", action.help or "")
            listed = re.search(r"default:? (\d[\d.,]*)", action.help or "")
            if listed and isinstance(action.default, list):
                shown, given = listed[1].split(","), [str(each) for each in action.default]
                if (shown[0], shown[-1]) != (given[0], given[-1]) or (shown != given and ".." not in shown):
                    typed.append(f"{parser.prog} {action.option_strings[0]}: {listed[1]}")
            if found and isinstance(action.default, str | int | float):
                told += 1
                if not found[1].startswith("%(default"):
                    typed.append(f"{parser.prog} {action.option_strings[0]}: {found[1]}")
    assert told > 50 and not typed, typed
