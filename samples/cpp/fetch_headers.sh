#!/bin/sh
# Puts ONNX Runtime's C and C++ headers (Debian trixie's package libonnxruntime-dev, API 21) into OUTPUT_DIR/usr/include/onnxruntime.
# The package comes from the Debian mirror that this machine's apt already uses; apt checks its signature and hash.
# Nothing is installed: apt's lists and caches of this one download lie in OUTPUT_DIR too.
set -eu

if [ $# -ne 1 ]; then
  echo "usage: fetch_headers.sh OUTPUT_DIR" >&2
  exit 2
fi
suite=trixie
package=libonnxruntime-dev
header=usr/include/onnxruntime/onnxruntime_cxx_api.h

for tool in apt-get dpkg-deb; do
  command -v "$tool" >/dev/null || { echo "fetch_headers.sh needs $tool; elsewhere unpack an official release and set ONNXRUNTIME_ROOT." >&2; exit 4; }
done
mkdir -p "$1"
output=$(cd "$1" && pwd)
if [ -f "$output/$header" ]; then
  echo "$output/usr/include/onnxruntime"
  exit 0
fi

# The mirror is the one that serves Debian's main component here, whichever format the sources are written in.
mirror=$(apt-get indextargets --format '$(ORIGIN)|$(LABEL)|$(COMPONENT)|$(REPO_URI)' 'Created-By: Packages' 2>/dev/null |
  awk -F'|' '$1 == "Debian" && $2 == "Debian" && $3 == "main" { print $4; exit }')
if [ -z "$mirror" ]; then  # no lists yet (a fresh container): read the sources themselves
  mirror=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null |
    sed -nE 's#^(URIs:|deb( \[[^]]*\])?)[[:space:]]+([^[:space:]]+/debian)/?([[:space:]].*)?$#\3#p' | head -n 1)
fi
if [ -z "$mirror" ]; then
  echo "fetch_headers.sh: no Debian mirror in apt's sources; unpack an official release and set ONNXRUNTIME_ROOT." >&2
  exit 4
fi
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
[ -f "$keyring" ] || { echo "fetch_headers.sh: $keyring is missing; run apt-get install debian-archive-keyring." >&2; exit 4; }

work="$output/apt"
rm -rf "$work"
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/parts" "$work/download"
echo "deb [signed-by=$keyring] $mirror $suite main" > "$work/sources.list"
: > "$work/status"
# Private folders only; how to reach the mirror (proxies, credentials) stays as configured.
apt_private() {
  apt-get -qq -o Dir::State::Lists="$work/lists" -o Dir::State::status="$work/status" -o Dir::Cache="$work/cache" \
    -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts="$work/parts" \
    -o Acquire::Languages=none -o Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled=false \
    -o APT::Sandbox::User="$(id -un)" -o APT::Update::Post-Invoke-Success= -o APT::Update::Error-Mode=any "$@"
}
apt_private update || { echo "fetch_headers.sh: the Debian mirror cannot be reached; unpack an official release and set ONNXRUNTIME_ROOT." >&2; exit 4; }
(cd "$work/download" && apt_private download "$package")
dpkg-deb -x "$work/download/$package"_*.deb "$work/unpacked"
api=$(sed -nE 's/^#define ORT_API_VERSION ([0-9]+)$/\1/p' "$work/unpacked/usr/include/onnxruntime/onnxruntime_c_api.h")
if [ ! -f "$work/unpacked/$header" ] || [ "${api:-0}" -lt 21 ]; then
  echo "fetch_headers.sh: $package of $suite has no usable headers (API ${api:-unknown}; 21 or newer is needed)." >&2
  exit 4
fi
rm -rf "$output/usr"
mv "$work/unpacked/usr" "$output/usr"  # complete or not there at all
rm -rf "$work"
echo "$output/usr/include/onnxruntime"
