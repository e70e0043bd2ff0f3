PYTHON ?= python3

.PHONY: dev
# Compiles native/ incrementally and puts the extension beside the Python sources.
dev:
	tools/build_native.sh
