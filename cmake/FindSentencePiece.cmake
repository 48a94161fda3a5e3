# SPDX-License-Identifier: Apache-2.0
# SentencePiece::SentencePiece: tokenizer and trainer. Not by pkg-config, which on Ubuntu 24.04 wants protobuf's development files
# for a library that needs none of them.
find_path(SentencePiece_INCLUDE_DIR sentencepiece_trainer.h)
find_library(SentencePiece_LIBRARY sentencepiece)
find_library(SentencePiece_TRAIN_LIBRARY sentencepiece_train)
mark_as_advanced(SentencePiece_INCLUDE_DIR SentencePiece_LIBRARY SentencePiece_TRAIN_LIBRARY)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(SentencePiece REQUIRED_VARS SentencePiece_LIBRARY SentencePiece_TRAIN_LIBRARY SentencePiece_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "install libsentencepiece-dev")
if(SentencePiece_FOUND AND NOT TARGET SentencePiece::SentencePiece)
  add_library(SentencePiece::SentencePiece INTERFACE IMPORTED)
  target_include_directories(SentencePiece::SentencePiece INTERFACE "${SentencePiece_INCLUDE_DIR}")
  target_link_libraries(SentencePiece::SentencePiece INTERFACE "${SentencePiece_LIBRARY}" "${SentencePiece_TRAIN_LIBRARY}")
endif()
