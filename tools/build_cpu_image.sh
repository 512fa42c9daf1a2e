#!/bin/bash
# Builds the CPU image of docker/Dockerfile without Docker and without a registry, and runs a command in it:
#
#   tools/build_cpu_image.sh FOLDER [OPTIONS OF buildah build] [-- COMMAND]
#
# The base image is a Debian root with Python that mmdebstrap makes from packages. It gets the name after FROM in the
# Dockerfile. All other steps of the Dockerfile run unchanged. FOLDER holds the root and the images, about 15 GB.
# An image that FOLDER already has is used again. COMMAND is `make quickstart` by default.
# Needs root, and the packages mmdebstrap and buildah. Options such as --volume DIR:DIR:ro or --env NAME=VALUE pass
# a package index or a proxy of this machine into the build.
set -euo pipefail

folder=$(realpath -m "${1:?tools/build_cpu_image.sh: FOLDER is missing; name a folder for the root and the images}")
shift
options=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    options+=("$1")
    shift
done
command=("${@:2}")
[ ${#command[@]} -gt 0 ] || command=(make quickstart)
cd "$(dirname "$0")/.."
base=$(sed -n 's/^FROM \(python:.*\) AS cpu$/\1/p' docker/Dockerfile)
suite=${base##*-} # bookworm
mkdir -p "$folder"
run_buildah() {
    action=$1
    shift
    buildah --root "$folder/storage" --runroot "$folder/run" --storage-driver vfs "$action" "$@"
}

if run_buildah inspect --type image localhost/megatron-coca-cpu > /dev/null 2>&1; then
    echo "$folder has an image, which is used again; remove the folder to build another one"
else
    if [ ! -f "$folder/root.tar" ]; then
        include=ca-certificates,python3,python3-dev,python3-venv
        mmdebstrap --variant=minbase --include="$include" "$suite" "$folder/root.tar"
    fi
    container=$(run_buildah from scratch)
    run_buildah add --quiet "$container" "$folder/root.tar" /
    run_buildah commit --quiet --rm "$container" "localhost/$base"
    run_buildah build --isolation chroot --pull-never --file docker/Dockerfile --build-arg DEVICE=cpu \
        --ignorefile docker/Dockerfile.dockerignore --tag megatron-coca-cpu "${options[@]}" .
fi

container=$(run_buildah from --pull-never localhost/megatron-coca-cpu)
trap 'run_buildah rm "$container" > /dev/null' EXIT
run_buildah run --isolation chroot "$container" -- id
run_buildah run --isolation chroot "$container" -- "${command[@]}"
