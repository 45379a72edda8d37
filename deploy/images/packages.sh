#!/bin/sh
# Makes the environment /opt/turnwire of a rollout image: packages.sh transformers|vllm cpu|cuda. The trainer's image begins
# with the same layer, so that it is built, stored and pulled once.
#
# What lies in /wheels is taken from there. Builds of torch for CPUs come from an index of their own; those for CUDA are
# PyPI's, with the libraries that they name.
set -eu
engine=$1 device=$2
case $engine-$device in
    transformers-cpu | transformers-cuda) lock=/wheels/rollout.txt ;;
    vllm-cpu) lock=/wheels/rollout-vllm.txt ;;
    vllm-cuda) lock=/wheels/vllm.txt ;;
    *) echo "packages.sh: ENGINE=$engine DEVICE=$device; they must be transformers or vllm, and cpu or cuda" >&2; exit 2 ;;
esac
python3 -m venv --without-pip /opt/turnwire
install() { python3 -m pip --python /opt/turnwire/bin/python install --no-cache-dir --find-links /wheels "$@"; }

torch=$(grep '^torch==' "$lock")
grep -v '^torch==' "$lock" >/tmp/rest.txt
install --no-deps -r /tmp/rest.txt
case $engine-$device in
    *-cpu)
        if ls /wheels/torch-*.whl >/dev/null 2>&1; then
            install --no-deps --no-index "$torch"
        else
            install --no-deps --index-url "$TORCH_CPU_INDEX" "$torch+cpu"
        fi ;;
    transformers-cuda) install "$torch" ;; # its libraries are not in the lock, which was made on a CPU
    vllm-cuda) install --no-deps "$torch" ;;
esac

# What only builds and tests of torch's own use; vLLM compiles against the headers.
cd /opt/turnwire/lib/python3*/site-packages/torch
rm -rf test lib/*.a lib/*_test.so
find bin -type f ! -name torch_shm_manager -delete
[ "$engine" = vllm ] || rm -rf include
