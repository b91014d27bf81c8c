"""Answer the requests of an OpenAI batch file."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from llmjax.config import EngineConfig
from llmjax.errors import ConfigError

from .flags import add_engine_flags, add_log_level, engine_options, set_up_logging
from .results import require_writable

if TYPE_CHECKING:
    from ..batch_lines import Line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-i", "--input-file", required=True, type=Path, metavar="FILE")
    parser.add_argument(
        "-o", "--output-file", required=True, type=Path, metavar="FILE", help="written as they come"
    )
    add_engine_flags(parser, positional_model=True)
    add_log_level(parser)


def run(args: argparse.Namespace) -> int:
    from ..batch_lines import read_lines

    set_up_logging(getattr(logging, args.log_level.upper()))
    config = EngineConfig.of(**engine_options(args))
    try:
        lines = read_lines(args.input_file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{getattr(error, 'filename', args.input_file)}: {error}") from error
    require_writable("--output-file", args.output_file)
    failed = asyncio.run(answer(config, lines, args.output_file))
    print(f"{len(lines) - failed} of {len(lines)} requests were answered: {args.output_file}")
    return 1 if failed else 0


async def answer(config: EngineConfig, lines: list[Line], output: Path) -> int:
    """Writes what comes of each line; how many failed."""
    from aiohttp import web

    from ..app import make_app
    from ..batch_lines import ask_all
    from ..config import ServerConfig
    from ..private_site import BASE, private_session
    from ..server import load_engine
    from ..state import ServerState

    engine = load_engine(config, None)
    engine.start()
    state = ServerState(config.model.name, ServerConfig())
    state.put(engine)
    runner = web.AppRunner(make_app(state), access_log=None)
    await runner.setup()
    failed, at_once = 0, 2 * config.scheduler.max_num_seqs
    try:
        async with private_session(runner) as session:
            with output.open("w", encoding="utf-8") as file, tqdm(total=len(lines)) as bar:
                async for answered in ask_all(session, BASE, lines, at_once=at_once):
                    file.write(json.dumps(answered.as_dict(), ensure_ascii=False) + "\n")
                    failed += answered.failed
                    bar.update()
    finally:
        engine.stop()
        await runner.cleanup()
        state.close()
    return failed
