#!/bin/sh
# Install the environments of a quantpress wheelhouse without a network. Written by `python -m pipeline wheelhouse`.
#   sh install.sh [REPOSITORY]    from any folder; the repository is the current folder unless it is named
# PYTHON names the Python @PYTHON@ to build on (default python3). Checks every part before it installs anything.
set -eu
python=${PYTHON:-python3}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "${1:-.}" && pwd)
fail() { echo "quantpress: error: $*" >&2; exit 1; }

[ -f "$root/params.yaml" ] || fail "$root is no quantpress repository; name it: sh install.sh REPOSITORY"
found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || fail "$python does not run; set PYTHON"
[ "$found" = "@PYTHON@" ] || fail "$python is Python $found, this wheelhouse is for @PYTHON@; set PYTHON"
(cd "$here" && sha256sum --check --quiet SHA256SUMS) ||
    fail "a file of the wheelhouse is missing or has other bytes than SHA256SUMS says; copy it again"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cat "$here"/wheelhouse.tar.[0-9]* | tar -x -C "$scratch"

# environment NAME FOLDER DIGEST SHARES_HOST NOTE WHEEL...
environment() {
    name=$1 folder=$root/$2 digest=$3 shared=$4 note=$5
    shift 5
    venv=$folder/.venv
    echo "$name: $# wheels into $venv"
    rm -rf "$venv"
    "$python" -m venv --without-pip "$venv"
    if [ "$shared" = yes ]; then
        # The host's own packages come after the environment's: only what is not in the wheelhouse is taken from there.
        site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        "$python" -c 'import site, sysconfig
paths = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
print("\n".join(dict.fromkeys(paths)))' >"$site/host.pth"
    fi
    list=$scratch/$name.txt
    for wheel in "$@"; do echo "$scratch/wheels/$wheel"; done >"$list"
    if [ $# -eq 0 ]; then
        :
    elif command -v uv >/dev/null 2>&1; then
        uv pip install --quiet --offline --no-index --no-deps --link-mode copy --python "$venv/bin/python" -r "$list"
    else
        "$python" -m pip --python "$venv/bin/python" install --quiet --no-index --no-deps --no-compile \
            --disable-pip-version-check --no-cache-dir -r "$list"
    fi
    "$venv/bin/python" -m compileall -q -j 0 "$venv/lib" >/dev/null 2>&1 || true
    printf '%s\n' "$note" >"$venv/installed.json"
    # Last: what is not whole has no marker (pipeline/runstage.py looks for it).
    printf '%s' "$digest" >"$venv/installed.sha256"
}

# Side by side: each is its own folder.
jobs=
@ENVIRONMENTS@
for job in $jobs; do wait "$job" || fail "an environment was not installed; see above"; done
echo "installed; now: export PATH=$root/.venv/bin:\$PATH"
