#!/bin/sh
# The images that the chart pulls, one a line; with a registry, the lines of a copy job: SOURCE TARGET.
# The chart asks that registry for exactly these targets when it is installed with global.imageRegistry=REGISTRY.
#   helm template valve helm/valve | helm/images.sh
#   helm template valve helm/valve | helm/images.sh registry.example.com/mirror | xargs -n 2 crane copy
set -eu
registry=${1:-}
sed -n 's/^ *\(- \)\{0,1\}image: *"\{0,1\}\([^" ]*\)"\{0,1\} *$/\2/p' | sort -u | while read -r image; do
	if [ -z "$registry" ]; then
		echo "$image"
		continue
	fi
	first=${image%%/*}
	case $first in
	"$image") path=$image ;;           # no registry: docker.io's library
	*.* | *:* | localhost) path=${image#*/} ;;
	*) path=$image ;;
	esac
	echo "$image ${registry%/}/$path"
done
