#!/bin/sh
# The first measurements on a GPU: each part leaves its log and its results in a folder (docs/gpu_report.md).
#
#     PYTHON=.venv/bin/python sh tools/gpu_report.sh [FOLDER]        or: make gpu-report
#
# A part is ended at its time limit, and none stops the others. The same command continues after an interruption: parts
# that are done (FOLDER/PART.done) are not run again. Exit status 1 if a part failed, 2 without a usable GPU.

python=${PYTHON:-python}
folder=${1:-results/gpu}
failed=0

mkdir -p "$folder"
"$python" -c 'import torch; torch.zeros(1, device="cuda")' > "$folder/gpu.log" 2>&1 || {
    tail -n 1 "$folder/gpu.log" >&2
    echo "gpu_report: PyTorch finds no usable GPU; is one in nvidia-smi, and is its driver new enough?" >&2
    exit 2
}
nvidia-smi -q > "$folder/nvidia-smi.txt" 2>&1
"$python" -m pip freeze > "$folder/versions.txt" 2>&1

# part NAME MINUTES ARGUMENTS...: run Python with the arguments, unless it was done.
part() {
    name=$1 minutes=$2
    shift 2
    [ -e "$folder/$name.done" ] && return
    echo "$name: $minutes minutes at most"
    rm -f "$folder/$name".json*
    if timeout -k 30 "${minutes}m" "$python" "$@" > "$folder/$name.log" 2>&1; then
        touch "$folder/$name.done"
    else
        failed=1
        echo "$name: failed, see $folder/$name.log" >&2
    fi
}

model=configs/350M/roformer_coca.yml
one="$model configs/cluster/gpu1.yml train_batch_size=null gradient_accumulation_steps=1"
pythia="seq_length=2048 max_position_embeddings=2048 rotary_pct=0.25 gpt_j_residual=true"
four="rotary coca alibi none"

# One training step as train.py takes it, 16 x 512 tokens, beside transformers compiled; the same with CUDA graphs; and
# one of the shape of Pythia 410M, whose speed is published.
step() {
    name=$1 minutes=$2
    shift 2
    # shellcheck disable=SC2086 # the keys are words
    part "$name" "$minutes" tools/bench_train.py $one --compile --output "$folder/$name.jsonl" "$@"
}
# Milliseconds and gigabytes by method and length.
speed() {
    name=$1 minutes=$2
    shift 2
    part "$name" "$minutes" evaluate.py speed --config $model --device cuda --dtype bfloat16 --overwrite \
        --output "$folder/$name.json" "$@"
}

part tests 20 -m pytest -m gpu tests/gpu
step step 15 --methods $four --peer transformers --rounds 30
step graphs 15 cuda_graphs=true --methods $four --rounds 30
step neox 10 $pythia train_micro_batch_size_per_gpu=16 --methods rotary --rounds 20
speed attention 10 --what "layer forward+backward" --lengths 512,2048,8192 --methods rotary,coca,alibi --batch-size 8
speed decode 10 --what decode --lengths 512,4096 --methods rotary,coca,alibi
part tuner 40 -m megatron_coca.kernels.tune --head-dim 64
speed memory 10 --what "model forward+backward" --lengths 32768 --methods rotary,coca --rounds 1

exit $failed
