# Sourced by setup.sh: unpacks Debian packages of another suite or architecture into a folder, without installing them.
# A private apt configuration is used, so the system's own is left alone; the mirror is the one the system uses.

# Prints the address of the Debian mirror that apt is configured with.
debian_mirror() {
  local uri
  uri="$(apt-get indextargets --format '$(REPO_URI) $(COMPONENT) $(ORIGIN)' |
    awk '$2 == "main" && $3 == "Debian" && $1 !~ /security/ { print $1; exit }')"
  if [ -z "$uri" ]; then
    echo "arm: apt has no Debian mirror configured (run apt-get update); the emulated tests need Debian 12 or 13" >&2
    return 1
  fi
  echo "$uri"
}

# unpack_debian MODE SUITE ARCHITECTURE FOLDER PACKAGE...
# MODE "alone" unpacks just the packages, "closure" also what they depend on.
unpack_debian() {
  local mode="$1" suite="$2" architecture="$3" folder="$4" mirror apt_root
  shift 4
  mirror="$(debian_mirror)"
  apt_root="$(mktemp -d)"
  mkdir -p "$apt_root"/{etc/preferences.d,state/lists/partial,cache/archives/partial,downloads} "$folder"
  : >"$apt_root/state/status"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" >"$apt_root/etc/sources.list"
  local options=(
    -qq -o Dir::Etc::sourcelist="$apt_root/etc/sources.list" -o Dir::Etc::sourceparts=/dev/null
    -o Dir::Etc::preferencesparts="$apt_root/etc/preferences.d" -o Dir::State="$apt_root/state"
    -o Dir::State::status="$apt_root/state/status" -o Dir::Cache="$apt_root/cache"
    -o APT::Architecture="$architecture" -o APT::Architectures="$architecture" -o APT::Install-Recommends=false
    -o Acquire::Languages=none -o APT::Sandbox::User=root -o Debug::NoLocking=true
  )
  apt-get "${options[@]}" update
  if [ "$mode" = alone ]; then
    (cd "$apt_root/downloads" && apt-get "${options[@]}" download "$@")
  else
    apt-get "${options[@]}" install --download-only --yes "$@" >/dev/null
    mv "$apt_root"/cache/archives/*.deb "$apt_root/downloads/"
  fi
  local package
  for package in "$apt_root"/downloads/*.deb; do
    dpkg-deb --extract "$package" "$folder"
  done
  rm -rf "$apt_root"
}
