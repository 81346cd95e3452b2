# vLLM's own image with the overlay applied to its vLLM; docs/deploy.md. docker/build.sh RELEASE gives the arguments.
ARG BASE_IMAGE

# Is this the base for RELEASE, and does the overlay go onto it? Also makes the environment of the tools.
FROM ${BASE_IMAGE} AS check
ARG RELEASE
# Options of apply-patches.sh; empty, it applies the series that are not on request.
ARG SERIES
COPY . /src
RUN python3 -B /src/docker/check.py base "$RELEASE" && \
    XDG_CACHE_HOME=/src/.cache /src/scripts/apply-patches.sh --installed --check $SERIES && \
    touch --date=@0 /src/checked

# What is compiled depends on little, so that most changes leave it cached; and on the check, so that a wrong base does
# not take minutes to be refused.
FROM ${BASE_IMAGE} AS kernels
COPY --from=check /src/checked /src/
COPY csrc /src/csrc
COPY scripts/build-kernels.sh scripts/python.sh /src/scripts/
COPY overlay/common/vllm/third_party/mla_kernels/native.py /src/overlay/common/vllm/third_party/mla_kernels/
ARG MLA_CUDA_ARCHS="90a 100a 103a 120a"
RUN /src/scripts/build-kernels.sh /out/libmla_kernels.so

FROM check AS built
COPY --from=kernels /out /out
RUN /src/scripts/build-kernels.sh --from /out/libmla_kernels.so

# To be mounted: buildah 1.28 mounts a stage that is all cached without what its last step made.
FROM built AS mounted

FROM ${BASE_IMAGE}
# Empty, FlashInfer stays as the base has it. Else the two packages of it that are on PyPI; the third,
# flashinfer-jit-cache, is on FlashInfer's own index only, and refuses to be imported beside another version.
ARG FLASHINFER
RUN --mount=type=bind,source=docker,target=/src \
    [ -z "$FLASHINFER" ] || { \
        export PIP_ROOT_USER_ACTION=ignore && \
        python3 -B -m pip uninstall --yes --quiet flashinfer-jit-cache && \
        python3 -B -m pip install --quiet --no-cache-dir --no-compile --no-deps --require-hashes \
            -r "/src/flashinfer-$FLASHINFER.txt"; \
    }
ARG RELEASE
ARG SERIES
ARG BASE_NAME
ARG BASE_DIGEST
ARG REVISION
ARG VERSION
# The check imports vLLM, which writes to its home and beside its modules: no layer may hold that. Not a tmpfs on /tmp:
# buildah 1.28 removes the folder it was mounted on.
RUN --mount=type=bind,from=mounted,source=/src,target=/src \
    export HOME="$(mktemp -d)" PYTHONDONTWRITEBYTECODE=1 && export TMPDIR="$HOME" && \
    XDG_CACHE_HOME=/src/.cache DSV4_OVERLAY_COMMIT="$REVISION" /src/scripts/apply-patches.sh --installed $SERIES && \
    python3 /src/docker/check.py image "$RELEASE" \
        base_name="$BASE_NAME" base_digest="$BASE_DIGEST" revision="$REVISION" \
        --flashinfer "$FLASHINFER" --record /usr/share/vllm-dsv4-overlay/provenance.json && \
    rm -rf "$HOME"
ARG SOURCE
ARG CREATED
LABEL org.opencontainers.image.title="vllm-dsv4-overlay" \
      org.opencontainers.image.description="vLLM $RELEASE with the DeepSeek V4 overlay" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.source="$SOURCE" \
      org.opencontainers.image.created="$CREATED" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.base.name="$BASE_NAME" \
      org.opencontainers.image.base.digest="$BASE_DIGEST"
