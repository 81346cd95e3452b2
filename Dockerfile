# vLLM's own image with the overlay applied to its vLLM; docs/deploy.md. docker/build.sh RELEASE gives the arguments.
ARG BASE_IMAGE
FROM ${BASE_IMAGE} AS build
ARG RELEASE
COPY docker/check.py /src/docker/
RUN python3 -B /src/docker/check.py base "$RELEASE"
# What is compiled comes first: the rest changes more often.
COPY csrc /src/csrc
COPY scripts/build-kernels.sh /src/scripts/
COPY overlay/common/vllm/third_party/dsv4_kernels/native.py /src/overlay/common/vllm/third_party/dsv4_kernels/
ARG DSV4_CUDA_ARCHS="90a 100a 103a 120a"
RUN /src/scripts/build-kernels.sh
COPY . /src
# Also makes the environment of the tools, which stays in this stage.
RUN XDG_CACHE_HOME=/src/.cache /src/scripts/apply-patches.sh --installed --check

# To be mounted: buildah 1.28 mounts a stage that is all cached without what its last step made.
FROM build AS built

FROM ${BASE_IMAGE}
# FlashInfer compares the versions of its packages when imported. The pair is on the package index; the third, its
# kernels compiled ahead, is not, and would be of another version.
ARG FLASHINFER
RUN --mount=type=bind,source=docker,target=/src \
    [ -z "$FLASHINFER" ] || { \
        export PIP_ROOT_USER_ACTION=ignore && \
        python3 -B -m pip uninstall --yes --quiet flashinfer-jit-cache && \
        python3 -B -m pip install --quiet --no-cache-dir --no-compile --no-deps --require-hashes \
            -r "/src/flashinfer-$FLASHINFER.txt"; \
    }
ARG RELEASE
ARG BASE_NAME
ARG BASE_DIGEST
ARG REVISION
ARG VERSION
# The check imports vLLM, which writes to its home and beside its modules: no layer may hold that. Not a tmpfs on /tmp:
# buildah 1.28 removes the folder it was mounted on.
RUN --mount=type=bind,from=built,source=/src,target=/src \
    export HOME="$(mktemp -d)" PYTHONDONTWRITEBYTECODE=1 && export TMPDIR="$HOME" && \
    XDG_CACHE_HOME=/src/.cache DSV4_OVERLAY_COMMIT="$REVISION" /src/scripts/apply-patches.sh --installed && \
    python3 /src/docker/check.py image "$RELEASE" \
        base_name="$BASE_NAME" base_digest="$BASE_DIGEST" revision="$REVISION" \
        --flashinfer "$FLASHINFER" --record /usr/share/vllm-dsv4-overlay/provenance.json && \
    rm -rf "$HOME"
LABEL org.opencontainers.image.title="vllm-dsv4-overlay" \
      org.opencontainers.image.description="vLLM $RELEASE with the DeepSeek V4 overlay" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.base.name="$BASE_NAME" \
      org.opencontainers.image.base.digest="$BASE_DIGEST"
