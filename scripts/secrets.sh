#!/usr/bin/env bash
# Make the secrets that docker-compose.yml mounts, in ./secrets or $SECRETS_DIR; those that are there stay as they are.
# Compose mounts a file with the owner and mode that it has here, and no container runs as you: so the files can be
# read by all, and the folder, which no container sees, by nobody but you.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${SECRETS_DIR:-secrets}
mkdir -p -m 0700 "$folder"
chmod 0700 "$folder"
for name in redis_password api_key grafana_password; do
    file=$folder/$name
    if [[ ! -s $file ]]; then
        head -c 24 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >"$file"
        echo "made $file"
    fi
    chmod 0444 "$file"
done
