// SPDX-License-Identifier: Apache-2.0
// A tokenizer.json that is taken gives tokens below its vocabulary for any text, and text without
// added tokens comes back.
#include "dynmo/data/tokenizer_json.h"
#include "tests/fuzz/target.h"
#include "tests/support/tiny_tokenizer.h"

namespace dynmo::fuzz {

Outcome run_target(std::string_view text) {
  const auto read = data::read_tokenizer_json(std::string(text), "tokenizer.json", {});
  if (!read) return refused(read.error());
  const data::Tokenizer& tokenizer = **read;
  DYNMO_CHECK(tokenizer.end_of_document() < tokenizer.vocabulary(), "an end below {}, got {}",
              tokenizer.vocabulary(), tokenizer.end_of_document());
  for (const std::string_view sample :
       {"the thing's 12345  \n\n e\xCC\x81 <|end|>", "\xFF\xE2\x82 \xF0\x9F\x8E\x89\xC2"}) {
    std::vector<std::int32_t> tokens;
    tokenizer.encode(sample, tokens);
    for (const std::int32_t token : tokens) {
      DYNMO_CHECK(token >= 0 && token < tokenizer.vocabulary(), "a token below {}, got {}",
                  tokenizer.vocabulary(), token);
    }
    (void)data::decode(tokenizer, tokens);
  }
  return Outcome::kTaken;
}

std::vector<std::string> seeds() {
  return {data::tiny_tokenizer().dump(),
          data::tiny_tokenizer(R"( ?\p{L}+|\p{N}{1,3}|\s+(?!\S)|\s+)").dump()};
}

}  // namespace dynmo::fuzz
