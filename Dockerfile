# SPDX-License-Identifier: Apache-2.0
# `docker build -t dynmo .`: the command and the libtorch that it trains with, on processors; --target core leaves libtorch out.
# No compiler is in it, and its user is not root. scripts/image builds and tries it.
ARG BASE=debian:12-slim

FROM ${BASE} AS build
ENV LANG=C.UTF-8
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates dpkg-dev file git make
COPY . /dynmo
WORKDIR /dynmo
RUN scripts/setup core runtime
RUN cmake --preset nightly -DDYNMO_RELOCATABLE=ON -DDYNMO_TESTS=OFF -DDYNMO_PYTHON=OFF -DDYNMO_CUDA=OFF
RUN cmake --build build/nightly --target dynmo dynmo_core dynmo_runtime dynmo_gloo_loop
RUN cd build/nightly && cpack -G DEB && mkdir /image && cp packages/dynmo_*.deb /image/
# What a program needs of the wheels of PyTorch, with their licences.
RUN cd "$(dirname "$(dirname "$(find "${DYNMO_CACHE:-$HOME/.cache/dynmo}" -path "*/torch/lib/libtorch_cpu.so" | head -n 1)")")/.." && \
    mkdir /image/torch && cp --parents -r torch/version.py torch/lib/libtorch_cpu.so torch/lib/libc10.so torch/lib/libgomp.so.* \
    torch-*.dist-info/licenses nvidia/cu13/lib/libcudart.so.* nvidia/cu13/lib/libcupti.so.* nvidia_cuda_*.dist-info /image/torch/

FROM ${BASE} AS core
COPY --from=build /image/*.deb /tmp/
RUN apt-get update && apt-get install -y --no-install-recommends /tmp/*.deb && \
    rm -rf /tmp/*.deb /var/lib/apt/lists/* /var/cache/apt/*.bin && useradd --create-home dynmo
USER dynmo
WORKDIR /home/dynmo
ENTRYPOINT ["dynmo"]

FROM core
COPY --from=build /image/torch /opt/torch
ENV DYNMO_TORCH_DIR=/opt/torch/torch
