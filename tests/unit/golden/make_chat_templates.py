"""Writes chat_templates.json: renderings by transformers of the templates in chat_templates/ for a set of chats.

python tests/unit/golden/make_chat_templates.py
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

from transformers.utils import chat_template_utils

HERE = Path(__file__).parent
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
NOW = datetime(2025, 3, 9, 7, 5, 1)

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Wetter für <Ort> & Tag — 天气 "now"',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "e.g. Zürich, 東京", "enum": ["Zürich", "東京"]},
                "days": {"type": "integer", "default": None},
            },
            "required": ["city"],
        },
    },
}
SYSTEM = {"role": "system", "content": "Be brief & kind <always>. "}
USER = {"role": "user", "content": "  What is 1 < 2 && 3? é 🙂\n"}
ANSWER = {"role": "assistant", "content": "True.\n"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00001",
            "type": "function",
            "function": {"name": "get_weather", "arguments": {"city": "Zürich <b>", "days": 2, "note": None}},
        }
    ],
}
RESULT = {
    "role": "tool",
    "name": "get_weather",
    "tool_call_id": "call00001",
    "content": '{"temp": 21, "sky": "heiter & ☀"}',
}
THOUGHT = {"role": "assistant", "content": "4", "reasoning_content": "two and two"}
PARTS = {"role": "user", "content": [{"type": "text", "text": " one "}, {"type": "text", "text": "two"}]}

CASES = {
    "plain": {"messages": [USER], "add_generation_prompt": True},
    "no_generation_prompt": {"messages": [USER], "add_generation_prompt": False},
    "system": {"messages": [SYSTEM, USER], "add_generation_prompt": True},
    "multi_turn": {"messages": [SYSTEM, USER, ANSWER, USER, THOUGHT, USER], "add_generation_prompt": True},
    "two_users": {"messages": [USER, USER], "add_generation_prompt": True},
    "tools": {"messages": [USER], "tools": [TOOL, TOOL], "add_generation_prompt": True},
    "tool_result": {"messages": [SYSTEM, USER, CALL, RESULT], "tools": [TOOL], "add_generation_prompt": True},
    "tool_results": {
        "messages": [USER, CALL, RESULT, RESULT, ANSWER, USER],
        "tools": [TOOL],
        "add_generation_prompt": True,
    },
    "continue": {"messages": [USER, {"role": "assistant", "content": "Once upon "}], "continue_final_message": True},
    "parts": {"messages": [PARTS], "add_generation_prompt": True},
    "variables": {"messages": [USER, THOUGHT, USER], "add_generation_prompt": True, "enable_thinking": False},
    "documents": {"messages": [USER], "documents": [{"title": "Ä & B", "text": "<t>"}], "add_generation_prompt": True},
}


class Clock(datetime):
    @classmethod
    def now(cls, tz: object = None) -> datetime:
        return NOW


def render(template: str, case: dict) -> dict[str, str]:
    case = json.loads(json.dumps(case))
    messages = case.pop("messages")
    try:
        texts, _ = chat_template_utils.render_jinja_template([messages], chat_template=template, **case, **TOKENS)
    except Exception as error:
        return {"error": str(error)}
    return {"text": texts[0]}


def main() -> None:
    chat_template_utils.datetime = Clock
    templates = {
        path.stem: path.read_text(encoding="utf-8") for path in sorted((HERE / "chat_templates").glob("*.jinja"))
    }
    result = {
        "tokens": TOKENS,
        "now": NOW.isoformat(),
        "cases": CASES,
        "expected": {
            name: {case: render(text, fields) for case, fields in CASES.items()} for name, text in templates.items()
        },
    }
    target = HERE / "chat_templates.json"
    target.write_text(json.dumps(result, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
